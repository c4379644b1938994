"""Co-located speculation: the verifier drafts for sessions whose devices draft nothing, for all of them in one decode.

The same proposals as a device's (outrider.core.proposals), so the same rule accepts them and the output stays the
target's own. A chain of `depth` tokens with `siblings` further children beside each, since those cost no decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.counts import TokenCounts
from outrider.core.errors import BadRequest
from outrider.core.proposals import propose
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, TokenTree

MOST_READ = 256
"""Tokens of prompts that one step's drafting reads, over all sessions: it holds up everybody's step."""
EACH = 16
"""And of what each session has committed since."""

Logits = NDArray[np.float32]


class Chains(Protocol):
    """What is needed of outrider.llama.ChainContext."""

    length: int

    @property
    def count(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def held(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def feed(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Logits: ...


@dataclass(frozen=True)
class DraftlessSession:
    """A session to draft for, as it stands before a step."""

    session_id: str
    tokens: Sequence[int]
    """Prompt and output; what is there never changes."""
    position: int
    """Generated tokens."""
    left: int
    """Tokens that may still be generated, at least 1."""
    sampling: SamplingParams
    key: int
    """Of its noise; 0 where greedy."""
    counts: TokenCounts
    ends: Callable[[int, int], bool]
    """(token, position) -> whether nothing follows."""


@dataclass(frozen=True)
class Effort:
    """What the last proposals took."""

    drafting_s: float = 0.0
    read: int = 0
    """Tokens of prompts, and of what was committed while nothing was drafted: of those who had over EACH to read."""
    reading_s: float = 0.0


@dataclass
class _Seat:
    """One sequence of the context."""

    sequence: int
    agreed: int = 0
    """Tokens held that are known to be the session's."""
    guesses: list[int] = field(default_factory=list)
    """Tokens held beyond those: what was drafted last."""


@dataclass
class _Growing:
    """A tree in the making."""

    thin: DraftlessSession
    seat: _Seat
    tree: TokenTree
    path: list[int] = field(default_factory=list)
    """Tokens of the chain."""
    tip: int = ROOT
    """The chain's last node."""


class LlamaServerDraft:
    """Owns the context's sequences; a session gets one with its first proposal and keeps it until `release`."""

    def __init__(
        self,
        chains: Chains,
        *,
        depth: int,
        siblings: int = 1,
        vocabulary: int,
        pauses: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """vocabulary: the target's; ids at or beyond it are never proposed. pauses: stop where it does not pay."""
        if depth < 1:
            raise BadRequest.bound("depth", depth, "at least 1")
        self._chains = chains
        self._depth = depth
        self._children = 1 + siblings
        self._shared = min(vocabulary, chains.vocab_size)
        self._free = list(range(chains.count - 1, -1, -1))
        self._seats: dict[str, _Seat] = {}
        self.seats = chains.count
        """Sessions that can be drafted for at once."""
        self.pauses = pauses
        self.effort = Effort()
        self._clock = clock
        self._strange: set[str] = set()
        """Sessions that it cannot draft for any more."""

    def propose(self, sessions: Sequence[DraftlessSession]) -> dict[str, TokenTree]:
        """Session id -> tree, for those that could be drafted for. One decode per level for all of them."""
        begun = self._clock()
        self.effort = Effort()
        growing, rows = self._catch_up(sessions)
        trees = {one.thin.session_id: one.tree for one in growing}
        for depth in range(self._depth):
            growing = [one for one, row in zip(growing, rows, strict=True) if self._extend(one, row)]
            if not growing or depth + 1 == self._depth:
                break
            rows = self._chains.feed([(one.seat.sequence, one.path[-1:]) for one in growing])
            for one in growing:
                one.seat.guesses.append(one.path[-1])
        self.effort = replace(self.effort, drafting_s=self._clock() - begun - self.effort.reading_s)
        return trees

    def unread(self, session_id: str, length: int) -> int:
        """Tokens that it has yet to read of a session of this length."""
        seat = self._seats.get(session_id)
        return length - seat.agreed if seat else length

    def release(self, session_id: str) -> None:
        """The session has ended."""
        self._strange.discard(session_id)
        seat = self._seats.pop(session_id, None)
        if seat is not None:
            self._chains.truncate(seat.sequence, 0)
            self._free.append(seat.sequence)

    def _catch_up(self, sessions: Sequence[DraftlessSession]) -> tuple[list[_Growing], Logits | list[Logits]]:
        """Read what was committed since; those that have read all, and the logits `[n, V]` after their last tokens."""
        seated = [(thin, seat) for thin in sessions if (seat := self._seat(thin)) is not None]
        behind = sorted(((self._unread(seat, thin), thin, seat) for thin, seat in seated), key=lambda one: len(one[0]))
        left = MOST_READ + EACH * len(behind)
        feeds: list[tuple[int, Sequence[int]]] = []
        growing: list[_Growing] = []
        for new, thin, seat in behind:  # the shortest first: only who has a prompt to read ever waits
            now = new[:left]
            if not now:
                break
            left -= len(now)
            seat.agreed += len(now)
            feeds.append((seat.sequence, now))
            if len(now) == len(new):
                growing.append(_Growing(thin, seat, TokenTree(thin.position)))
        return growing, self._read(feeds)[: len(growing)] if feeds else []

    def _read(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Logits:
        """One decode; its time is that of drafting and that of reading, by their tokens."""
        begun = self._clock()
        rows = self._chains.feed(feeds)
        tokens = sum(len(now) for _, now in feeds)
        usual = min(self._depth, EACH)  # what a session has to read that is drafted for in every step
        read = sum(len(now) - usual for _, now in feeds if len(now) > EACH)
        self.effort = Effort(read=read, reading_s=(self._clock() - begun) * read / tokens)
        return rows

    def _seat(self, thin: DraftlessSession) -> _Seat | None:
        """None where no sequence is free, or the session's tokens do not fit or mean nothing to the draft."""
        if thin.session_id in self._strange:
            return None
        seat = self._seats.get(thin.session_id)
        known = seat.agreed if seat else 0
        if len(thin.tokens) + self._depth > self._chains.length or max(thin.tokens[known:]) >= self._shared:
            self.release(thin.session_id)
            self._strange.add(thin.session_id)
            return None
        if seat is None and self._free:
            seat = self._seats[thin.session_id] = _Seat(self._free.pop())
        return seat

    def _unread(self, seat: _Seat, thin: DraftlessSession) -> Sequence[int]:
        """Keep of what was drafted what came true; the tokens after it, at least the last one, whose logits are due."""
        new = thin.tokens[seat.agreed :]
        true = 0
        while true < min(len(seat.guesses), len(new) - 1) and seat.guesses[true] == new[true]:
            true += 1
        seat.agreed += true
        seat.guesses = []
        self._chains.truncate(seat.sequence, seat.agreed)
        return new[true:]

    def _extend(self, one: _Growing, row: Logits) -> bool:
        """Add the children of the chain's tip; whether the chain goes on."""
        thin = one.thin
        at = thin.position + len(one.path)
        proposals = propose(
            row[: self._shared], thin.sampling, thin.key, at, thin.counts, tuple(one.path), self._children
        )
        if len(one.path) + 1 >= thin.left or not proposals:
            return False
        parent = one.tip
        for proposal in proposals:
            one.tree.add(len(one.tree) + 1, parent, proposal.token)
        one.tip = len(one.tree) + 1 - len(proposals)
        one.path.append(proposals[0].token)
        return not thin.ends(proposals[0].token, at)
