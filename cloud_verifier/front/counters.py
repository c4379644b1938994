"""What the front counts for operators: plain numbers on its event loop, added to once a message."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.core import errors
from outrider.core.errors import OutriderError
from outrider.core.histogram import CALL_S, LEVELS, STEP_S, Histogram
from outrider.core.protocol.messages import Directive

KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OutriderError))
"""Of errors: exported at 0 from the beginning, for a rate misses the event that makes a series."""
GONE = "gone"
"""How a stream ended whose device went away without a word."""
ENDS = ("eos", "length", "cancelled", GONE, *KINDS)
DEFECT = "InternalError"


@dataclass
class FrontCounters:
    """Since the process' begin."""

    opened: int = 0
    """Streams that were let in, as is the next."""
    resumed: int = 0
    """Of them, those whose devices had received tokens before."""
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KINDS, 0)))
    """Streams that ended with an error before any token, by the error's class."""
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENDS, 0)))
    """All others, by how: eos, length, cancelled, gone, or the error's class."""
    nodes: int = 0
    """That devices sent."""
    appends: int = 0
    append_commit_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    """From a device's nodes to the first Commit that has seen them."""
    rtt_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    """Answered pings."""
    k: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    """Of the directives that devices were told, as are the next two."""
    depth: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    draft_wait_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    reports: int = 0
    """That the coordinator took; the next: those that it did not."""
    reports_failed: int = 0
    report_s: Histogram = field(default_factory=lambda: Histogram(CALL_S))

    def told(self, directive: Directive) -> None:
        """A device was told how far to speculate."""
        self.k.add(directive.nodes_per_step)
        self.depth.add(directive.window_depth)
        self.draft_wait_s.add(directive.draft_wait_ms / 1000)


def kind_of(error: Exception) -> str:
    """Of a few words whatever is raised: the class of a core error, or the one that its peer is told of a defect."""
    return type(error).__name__ if isinstance(error, OutriderError) else DEFECT
