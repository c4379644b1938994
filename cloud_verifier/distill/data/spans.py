"""Puts together what the traffic log holds in passages: stretches of a session without a gap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import NO_PROMPT, Passage


class Source(Protocol):
    """What is read here; a `cloud_verifier.traffic.segments.SegmentLog`."""

    def read(self, since_unix: float = 0.0, now: float | None = None) -> Iterator[Passage]: ...


@dataclass(frozen=True)
class Outline:
    """A passage without the target's distributions, which are nearly all of its bytes."""

    session_id: str
    tenant: str
    traffic_class: str
    weights_hash: str
    start: int
    tokens: NDArray[np.int32]
    time_unix: float
    expires_unix: float
    prompt: NDArray[np.int32]

    @classmethod
    def of(cls, passage: Passage) -> Outline:
        return cls(
            passage.session_id,
            passage.tenant,
            passage.traffic_class,
            passage.weights_hash,
            passage.start,
            passage.tokens,
            passage.time_unix,
            passage.expires_unix,
            passage.prompt,
        )

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Stretch:
    """Tokens of one session without a gap."""

    session_id: str
    tenant: str
    traffic_class: str
    start: int
    """Position of its first token in the session."""
    tokens: NDArray[np.int32]
    time_unix: float
    """Of its newest passage."""
    expires_unix: float
    """Of the passage that expires first."""
    first: int = 1
    """Index of the first token that a draft learns from; those before it are context."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT)
    """What stood before its first token, where that was recorded: context too, and never learnt from. With it a draft
    learns from the first token on, so that `first` is 0."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def learnt(self) -> int:
        return max(0, len(self.tokens) - self.first)


def stretches(outlines: Iterable[Outline]) -> list[Stretch]:
    """Join the passages of each session. Cut at gaps, where class or tenant change, and where two disagree.

    After a failover two verifiers may have recorded the same positions: the older passage counts.
    """
    sessions: dict[tuple[str, str, str], list[Outline]] = defaultdict(list)
    for outline in outlines:
        sessions[outline.session_id, outline.tenant, outline.traffic_class].append(outline)
    return [stretch for key in sorted(sessions) for stretch in _joined(sessions[key])]


def cut(stretch: Stretch, window: int, overlap: int, prompt: int = 0) -> list[Stretch]:
    """Cut a stretch into pieces of at most `window` tokens. All but the first begin with `overlap` tokens of context,
    the first one with the last `prompt` tokens of its prompt, but no more than half a window.

    Every position is learnt exactly once, but for the very first where no prompt precedes it.
    """
    pieces = []
    context = stretch.prompt[max(0, len(stretch.prompt) - min(prompt, window // 2)) :]
    begin, learn_from = 0, 0 if len(context) else max(1, stretch.first)
    while learn_from < len(stretch.tokens):
        end = min(begin + window - len(context), len(stretch.tokens))
        pieces.append(
            Stretch(
                stretch.session_id,
                stretch.tenant,
                stretch.traffic_class,
                stretch.start + begin,
                stretch.tokens[begin:end],
                stretch.time_unix,
                stretch.expires_unix,
                learn_from - begin,
                context,
            )
        )
        begin, learn_from, context = max(0, end - overlap), end, NO_PROMPT
    return pieces


class _Run:
    """Passages that follow one another, while they are put together."""

    def __init__(self, outline: Outline) -> None:
        self._outlines = [outline]
        self._tokens = [outline.tokens]
        self._start = outline.start
        self._end = outline.end

    def take(self, outline: Outline) -> bool:
        """Add a passage that begins within the run or right after it, and says the same; else change nothing."""
        known = self._end - outline.start
        if known < 0:
            return False
        if known > 0:
            held = np.concatenate(self._tokens)[outline.start - self._start :]
            shared = min(known, len(outline.tokens))
            if not np.array_equal(held[:shared], outline.tokens[:shared]):
                return False
        if outline.end > self._end:
            self._tokens.append(outline.tokens[known:])
            self._outlines.append(outline)
            self._end = outline.end
        return True

    def stretch(self) -> Stretch:
        one = self._outlines[0]
        return Stretch(
            one.session_id,
            one.tenant,
            one.traffic_class,
            one.start,
            np.concatenate(self._tokens),
            max(outline.time_unix for outline in self._outlines),
            min(outline.expires_unix for outline in self._outlines),
            0 if len(one.prompt) else 1,
            one.prompt,
        )


def _joined(outlines: Sequence[Outline]) -> Iterator[Stretch]:
    run: _Run | None = None
    for outline in sorted(outlines, key=lambda one: (one.start, one.time_unix)):
        if run is not None and run.take(outline):
            continue
        if run is not None:
            yield run.stretch()
        run = _Run(outline)
    if run is not None:
        yield run.stretch()
