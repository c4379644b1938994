"""A stretch of one session's text that the target wrote, with the target's distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

NO_PROMPT: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Passage:
    """n tokens in a row. Raises ValueError where its arrays do not fit together."""

    session_id: str
    tenant: str
    traffic_class: str
    draft_release: str
    """That the device said it drafted with; empty where it said none."""
    weights_hash: str
    """Of the target."""
    start: int
    """Position of the first token among the generated ones."""
    tokens: NDArray[np.int32]
    """`[n]`"""
    top_ids: NDArray[np.int32]
    """`[n, K]`, the likeliest first."""
    top_log_probs: NDArray[np.float32]
    """`[n, K]`; natural logarithms, of the distribution before penalties, temperature and filters."""
    tail: NDArray[np.float32]
    """`[n]`: probability of all other ids together."""
    guessed: NDArray[np.uint8]
    """`[n]`: depth (1..255) at which the device's guess for the position was right, 0 where none was."""
    temperature: float
    """That the tokens were drawn at; 0 is greedy."""
    time_unix: float
    """Seconds; when it was produced."""
    expires_unix: float
    """Seconds; from then on it must not be used."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT)
    """What stood right before the first token, as far as it is kept: of a text's beginning, with its tenant's consent
    to that. Context to read, which nothing may be learnt from: the target did not write it."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        shapes = [array.shape for array in (self.tokens, self.tail, self.guessed)]
        if shapes != [(n,)] * 3 or self.top_ids.shape != self.top_log_probs.shape or self.top_ids.shape[:-1] != (n,):
            raise ValueError(
                f"a passage of {n} tokens has top_ids {self.top_ids.shape}, top_log_probs {self.top_log_probs.shape},"
                f" tail {self.tail.shape} and guessed {self.guessed.shape}; must be [n, K] twice and [n] twice"
            )
        if self.prompt.ndim != 1 or (len(self.prompt) and self.start):
            raise ValueError(
                f"a passage from position {self.start} on has a prompt {self.prompt.shape}; must be [p], from 0 on"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self)

    @property
    def top(self) -> int:
        """K."""
        return int(self.top_ids.shape[1])

    @property
    def key(self) -> tuple[float, str, int]:
        """Orders the log, and is the same for no two passages but for copies of one."""
        return self.time_unix, self.session_id, self.start

    def cut(self, begin: int, end: int) -> Passage:
        """Its tokens `begin` to `end`, counted from its own beginning."""
        begin, end, _ = slice(begin, end).indices(len(self))
        return replace(
            self,
            start=self.start + begin,
            tokens=self.tokens[begin:end],
            top_ids=self.top_ids[begin:end],
            top_log_probs=self.top_log_probs[begin:end],
            tail=self.tail[begin:end],
            guessed=self.guessed[begin:end],
            prompt=NO_PROMPT if begin else self.prompt,
        )

    def without(self, hidden: NDArray[np.bool_]) -> Iterator[Passage]:
        """What is left, in as many passages as need be, of it without some positions. hidden: `[n]`."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], hidden, [True]))))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            yield self.cut(int(begin), int(end))

    def goes_on_in(self, other: Passage) -> bool:
        """Whether the other is the same text's next part, from the same source."""
        mine, others = (
            (p.session_id, p.tenant, p.traffic_class, p.draft_release, p.weights_hash, p.temperature, p.top)
            for p in (self, other)
        )
        return mine == others and self.end == other.start


def join(passages: Sequence[Passage]) -> Passage:
    """One passage of several, each of which goes on in the next. It was produced when the last was, and expires with
    the first."""
    first, last = passages[0], passages[-1]
    return replace(
        first,
        tokens=np.concatenate([p.tokens for p in passages]),
        top_ids=np.concatenate([p.top_ids for p in passages]),
        top_log_probs=np.concatenate([p.top_log_probs for p in passages]),
        tail=np.concatenate([p.tail for p in passages]),
        guessed=np.concatenate([p.guessed for p in passages]),
        time_unix=last.time_unix,
        expires_unix=min(p.expires_unix for p in passages),
    )
