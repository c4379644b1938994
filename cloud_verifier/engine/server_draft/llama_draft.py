"""Draft on the verifier with llama.cpp for sessions whose devices draft nothing, all of them in one decode.

The proposals are the same as a device's (outrider.core.proposals), so the same rule accepts them and the output stays
the target's own. A tree is a chain of `depth` tokens with `siblings` further children at each level, which cost no
decode. Tokens that must follow by the session's grammar cost none either, and come in addition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.session import EngineSession
from outrider.core.errors import BadRequest
from outrider.core.proposals import propose
from outrider.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from outrider.llama import ChainContext

PROMPT_TOKENS = 256
"""The most tokens of prompts that are read in one step, over all sessions: reading delays the step of all."""
USUAL_TOKENS = 16
"""The most tokens, beside these, that are read of each session: those committed since it was last drafted for."""

Logits = NDArray[np.float32]


@dataclass
class _Sequence:
    """One sequence of the context, while a session has it."""

    number: int
    agreed: int = 0
    """Number of tokens held that are known to be the session's."""
    drafted: list[int] = field(default_factory=list)
    """Tokens held beyond those: the last draft."""


@dataclass
class _Draft:
    """A tree while it is drafted. path: tokens of the chain. tip: the chain's last node."""

    session: EngineSession
    sequence: _Sequence
    tree: TokenTree
    path: list[int] = field(default_factory=list)
    tip: int = ROOT

    def add(self, tokens: Sequence[int]) -> bool:
        """Add children of the tip, the first of which becomes the tip; return whether the chain goes on below it."""
        position = self.session.protocol.position + len(self.path)
        if len(self.path) + 1 >= self.session.left or not tokens:
            return False
        first = len(self.tree) + 1
        for number, token in enumerate(tokens):
            self.tree.add(first + number, self.tip, token)
        self.tip = first
        self.path.append(tokens[0])
        return not self.session.protocol.ends(tokens[0], position)


class LlamaServerDraft:
    """Drafts in the context's sequences; a session gets one with its first draft and keeps it until `release`.

    max_sessions: sessions that can be drafted for at once. drafting_s, reading_s: seconds of the last `propose`.
    read_tokens: tokens that it read of sessions that had more than USUAL_TOKENS to read.
    """

    def __init__(
        self,
        chains: ChainContext,
        *,
        depth: int,
        siblings: int = 1,
        vocabulary: int,
        pauses: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Never propose ids beyond the target's `vocabulary`. pauses: whether it pauses if it does not pay."""
        if depth < 1:
            raise BadRequest.bound("depth", depth, "at least 1")
        self._chains = chains
        self._depth = depth
        self._children = 1 + siblings
        self._shared = min(vocabulary, chains.vocab_size)
        self._free = list(range(chains.count - 1, -1, -1))
        self._sequences: dict[str, _Sequence] = {}
        self._refused: set[str] = set()
        """Sessions that cannot be drafted for any more."""
        self._clock = clock
        self.max_sessions = chains.count
        self.pauses = pauses
        self.drafting_s = self.reading_s = 0.0
        self.read_tokens = 0

    def propose(self, sessions: Sequence[EngineSession]) -> dict[str, TokenTree]:
        """Draft a tree for each session that can be drafted for, by id: one decode per level for all of them."""
        begun = self._clock()
        self.read_tokens, self.reading_s = 0, 0.0
        growing, rows = self._catch_up(sessions)
        trees = {one.session.session_id: one.tree for one in growing}
        for depth in range(self._depth):
            growing = [one for one, row in zip(growing, rows, strict=True) if self._extend(one, row)]
            if not growing or depth + 1 == self._depth:
                break
            rows = self._chains.feed([(one.sequence.number, one.path[len(one.sequence.drafted) :]) for one in growing])
            for one in growing:
                one.sequence.drafted = list(one.path)
        self.drafting_s = self._clock() - begun - self.reading_s
        return trees

    def unread(self, session_id: str, length: int) -> int:
        """Return how many tokens of a session of this length are still to be read."""
        sequence = self._sequences.get(session_id)
        return length - sequence.agreed if sequence else length

    def release(self, session_id: str) -> None:
        """Free the sequence of a session that has ended."""
        self._refused.discard(session_id)
        sequence = self._sequences.pop(session_id, None)
        if sequence is not None:
            self._chains.truncate(sequence.number, 0)
            self._free.append(sequence.number)

    def _catch_up(self, sessions: Sequence[EngineSession]) -> tuple[list[_Draft], Logits | list[Logits]]:
        """Read what was committed since; return sessions that are up to date, and their last logits `[n, V]`."""
        taken = [(session, sequence) for session in sessions if (sequence := self._sequence(session)) is not None]
        behind = sorted(
            ((self._unread(sequence, s), s, sequence) for s, sequence in taken), key=lambda one: len(one[0])
        )
        left = PROMPT_TOKENS + USUAL_TOKENS * len(behind)
        feeds: list[tuple[int, Sequence[int]]] = []
        growing: list[_Draft] = []
        for new, session, sequence in behind:  # the shortest first, so that only sessions with a prompt to read wait
            now = new[:left]
            if not now:
                break
            left -= len(now)
            sequence.agreed += len(now)
            feeds.append((sequence.number, now))
            if len(now) == len(new):
                growing.append(_Draft(session, sequence, TokenTree(session.protocol.position)))
        return growing, self._read(feeds)[: len(growing)] if feeds else []

    def _read(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Logits:
        """Decode once; its time counts as drafting and as reading in proportion to their tokens."""
        begun = self._clock()
        rows = self._chains.feed(feeds)
        tokens = sum(len(now) for _, now in feeds)
        usual = min(self._depth, USUAL_TOKENS)  # a session that is drafted for in every step has to read these
        self.read_tokens = sum(len(now) - usual for _, now in feeds if len(now) > USUAL_TOKENS)
        self.reading_s = (self._clock() - begun) * self.read_tokens / tokens
        return rows

    def _sequence(self, session: EngineSession) -> _Sequence | None:
        """Return the session's sequence; None if none is free, or if the context or vocabulary lacks its tokens."""
        if session.session_id in self._refused:
            return None
        sequence = self._sequences.get(session.session_id)
        known = sequence.agreed if sequence else 0
        if len(session.tokens) + self._depth > self._chains.length or max(session.tokens[known:]) >= self._shared:
            self.release(session.session_id)
            self._refused.add(session.session_id)
            return None
        if sequence is None and self._free:
            sequence = self._sequences[session.session_id] = _Sequence(self._free.pop())
        return sequence

    def _unread(self, sequence: _Sequence, session: EngineSession) -> Sequence[int]:
        """Drop what was drafted wrong and return the tokens to read: at least the last one, whose logits are needed."""
        new = session.tokens[sequence.agreed :]
        accepted = 0
        while accepted < min(len(sequence.drafted), len(new) - 1) and sequence.drafted[accepted] == new[accepted]:
            accepted += 1
        sequence.agreed += accepted
        sequence.drafted = []
        self._chains.truncate(sequence.number, sequence.agreed)
        return new[accepted:]

    def _extend(self, one: _Draft, row: Logits) -> bool:
        """Add the children of the chain's tip by its logits `[V]`, and what must follow the best one by the grammar.

        Returns whether the chain goes on.
        """
        session, sampler = one.session, one.session.sampler
        constraint = sampler.constraint
        position = session.protocol.position + len(one.path)
        logits, path = row[: self._shared], tuple(one.path)
        if constraint is not None and constraint.binds(position):
            logits = constraint.masked(logits, position, path)
        proposals = propose(logits, sampler.params, sampler.key, position, sampler.counts, path, self._children)
        goes_on = one.add([proposal.token for proposal in proposals])
        if goes_on and constraint is not None:
            room = min(USUAL_TOKENS, self._chains.length - len(session.tokens) - len(one.path) - self._depth)
            for token in constraint.forced(one.path)[: max(0, room)]:
                goes_on = goes_on and one.add([token])
        return goes_on and one.path[-1] < self._shared
