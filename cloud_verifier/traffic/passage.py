"""Define a passage: consecutive tokens that the target generated in one session, with its distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_PROMPT: NDArray[np.int32] = np.zeros(0, np.int32)
_ARRAYS = "tokens", "top_ids", "top_log_probs", "tail", "proposed_depths"
"""The fields with one entry, or row, for each token."""


@dataclass(frozen=True, eq=False)
class Passage:
    """A passage of n tokens that follow one another. Raises ValueError if its arrays do not fit together."""

    session_id: str
    tenant: str
    traffic_class: str
    draft_release: str
    """The release that the device said it drafted with; empty if it named none."""
    weights_hash: str
    """Hash of the target's weights."""
    start: int
    """Position of the first token among the generated ones."""
    tokens: NDArray[np.int32]
    """`[n]`: the tokens that were committed."""
    top_ids: NDArray[np.int32]
    """`[n, K]`: the target's likeliest ids, the likeliest first."""
    top_log_probs: NDArray[np.float32]
    """`[n, K]`: natural logarithms of the distribution before penalties, temperature and filters."""
    tail: NDArray[np.float32]
    """`[n]`: probability of all other ids together."""
    proposed_depths: NDArray[np.uint8]
    """`[n]`: depth (1..255) at which the device had proposed the token, 0 if it had not."""
    temperature: float
    """Sampling temperature of the tokens; 0 is greedy."""
    time_unix: float
    """When the passage was produced, in seconds since 1970."""
    expires_unix: float
    """When it must no longer be used, in seconds since 1970."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT)
    """`[p]`: the end of the prompt, in the log only in a passage that begins a text and only with the tenant's consent.
    It is context and no label: the target did not write it."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        shapes = [array.shape for array in (self.tokens, self.tail, self.proposed_depths)]
        if shapes != [(n,)] * 3 or self.top_ids.shape != self.top_log_probs.shape or self.top_ids.shape[:-1] != (n,):
            raise ValueError(
                f"a passage of {n} tokens has top_ids {self.top_ids.shape}, top_log_probs {self.top_log_probs.shape},"
                f" tail {self.tail.shape} and depths {self.proposed_depths.shape}; must be [n, K] twice and [n] twice"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self)

    @property
    def top(self) -> int:
        """Return K, the number of likeliest ids that are kept of each position."""
        return int(self.top_ids.shape[1])

    def cut(self, begin: int, end: int) -> Passage:
        """Return the tokens `begin` to `end`, counted from the passage's own beginning."""
        begin, end, _ = slice(begin, end).indices(len(self))
        return replace(
            self,
            start=self.start + begin,
            prompt=NO_PROMPT if begin else self.prompt,
            **{name: getattr(self, name)[begin:end] for name in _ARRAYS},
        )

    def without(self, hidden: NDArray[np.bool_]) -> Iterator[Passage]:
        """Yield what is left without the hidden positions, in as many passages as needed. hidden: `[n]`."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], hidden, [True]))))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            yield self.cut(int(begin), int(end))

    def continues_in(self, other: Passage) -> bool:
        """Return whether the other is the next part of the same text, from the same draft and target."""
        mine, others = (
            (p.session_id, p.tenant, p.traffic_class, p.draft_release, p.weights_hash, p.temperature, p.top)
            for p in (self, other)
        )
        return mine == others and self.end == other.start


def join(passages: Sequence[Passage]) -> Passage:
    """Join passages, each of which continues in the following one.

    The result has the time of the last passage, and expires with the one that expires first.
    """
    joined: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in passages]) for name in _ARRAYS}
    expires_unix = min(one.expires_unix for one in passages)
    return replace(passages[0], time_unix=passages[-1].time_unix, expires_unix=expires_unix, **joined)
