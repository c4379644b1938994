"""Count messages, tokens and ends of the front's streams, in plain numbers on its event loop; a scrape reads them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.core.errors import ANSWERS, OutriderError
from outrider.core.histogram import CALL_S, LEVELS, STEP_S, Histogram
from outrider.core.protocol.messages import Directive
from outrider.wire.v1 import session_pb2

KINDS = tuple(cls.__name__ for cls in ANSWERS)
"""Class names of errors: exported at 0 from the beginning, for a rate misses the event that creates a series."""
DISCONNECTED = "gone"
"""The end of a stream whose device disconnected without a Cancel."""
FINISHES = {
    session_pb2.FINISH_EOS: "eos",
    session_pb2.FINISH_LENGTH: "length",
    session_pb2.FINISH_CANCELLED: "cancelled",
}
ENDS = (*FINISHES.values(), DISCONNECTED, *KINDS)
DEFECT = "InternalError"
MAX_UNSEEN = 256
"""Appends of one stream without a Commit whose times are kept: those of one step."""


@dataclass
class FrontCounters:
    """Holds the counts of streams and reports since the process began; `metrics` says what each one counts."""

    opened: int = 0
    resumed: int = 0
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KINDS, 0)))
    """Streams that ended with an error before any token, by the error's class."""
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENDS, 0)))
    """All other streams, by how they ended: eos, length, cancelled, gone, or the error's class."""
    nodes: int = 0
    appends: int = 0
    append_commit_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    rtt_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    nodes_per_step: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    depth: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    draft_wait_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    reports: int = 0
    reports_failed: int = 0
    report_s: Histogram = field(default_factory=lambda: Histogram(CALL_S))
    tenant_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that have gone to devices of each tenant with an API key, and that are in no batch yet."""
    tokens_batch: Mapping[str, int] = field(default_factory=dict)
    """Those that reports tell until one is answered."""
    tokens_sequence: int = 0
    """The number of that batch."""

    def batch(self) -> tuple[int, Mapping[str, int]]:
        """Return the tokens that a report tells, with their number: the same until `told`, so that they count once."""
        if not self.tokens_batch and self.tenant_tokens:
            self.tokens_batch, self.tenant_tokens = self.tenant_tokens, Counter()
            self.tokens_sequence += 1
        return self.tokens_sequence, self.tokens_batch

    def told(self) -> None:
        """Forget the batch, since a report with it was answered."""
        self.tokens_batch = {}


class StreamCounters:
    """Counts what happens on one stream, for itself and into the counts of all streams."""

    def __init__(self, total: FrontCounters, tenant: str = "") -> None:
        """tenant: whose tokens are counted for the coordinator; "" if nobody's are."""
        self.tokens = 0
        """Tokens that have gone to the device."""
        self.finish = session_pb2.FINISH_NONE
        """The finish of the last Commit that has gone to the device."""
        self._total = total
        self._tenant = tenant
        self._unseen: deque[tuple[int, float]] = deque(maxlen=MAX_UNSEEN)
        """(last id, time) of the Appends that no Commit has seen yet"""

    def append(self, first_id: int, nodes: int) -> None:
        """Count an Append whose nodes have ids from `first_id` on."""
        self._total.appends += 1
        if nodes:
            self._total.nodes += nodes
            self._unseen.append((first_id + nodes - 1, time.monotonic()))

    def commit(self, commit: session_pb2.Commit) -> None:
        self.finish = commit.finish
        tokens, seen = len(commit.token), commit.seen
        self.tokens += tokens
        if self._tenant:
            self._total.tenant_tokens[self._tenant] += tokens
        now = time.monotonic()
        while self._unseen and self._unseen[0][0] <= seen:
            self._total.append_commit_s.add(now - self._unseen.popleft()[1])

    def round_trip(self, sample_ms: float) -> None:
        self._total.rtt_s.add(sample_ms / 1000)

    def directive(self, directive: Directive) -> None:
        self._total.nodes_per_step.add(directive.nodes_per_step)
        self._total.depth.add(directive.window_depth)
        self._total.draft_wait_s.add(directive.draft_wait_ms / 1000)


def kind_of(error: Exception) -> str:
    """Return the class name of a core error, and InternalError for any other, as its peer gets it."""
    return type(error).__name__ if isinstance(error, OutriderError) else DEFECT
