"""Draft on the verifier with llama.cpp, for all sessions in one decode.

The proposals are the same as a device's (outrider.core.proposals), so the same rule accepts them and the output stays
the target's own. A tree is a chain of `depth` tokens with a further child at each level, which costs no decode.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.nodes import ProposedTree
from cloud_verifier.engine.server_draft.base import (
    USUAL_TOKENS,
    ProposalRequest,
    ServerSource,
    kind_of,
    level_pays,
    without_early_ends,
)
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.proposals import propose
from outrider.core.tree import ROOT

if TYPE_CHECKING:
    from outrider.llama import ChainContext

log = logging.getLogger(__name__)

PROMPT_TOKENS = 256
"""The most tokens of prompts that are read in one step, over all sessions: reading delays the step of all."""

CHILDREN = 2
"""Children of each token of the chain: the one that it goes on with, and one that costs no decode."""

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
    """A tree while it is drafted: a chain, and children beside it."""

    request: ProposalRequest
    sequence: _Sequence
    unread: Sequence[int]
    """Tokens of the session that the sequence must read first: at least the last one, whose logits are needed."""
    tree: ProposedTree
    path: list[int] = field(default_factory=list)
    """Tokens of the chain."""
    tip: int = ROOT
    """The chain's last node."""
    acceptance: float = 1.0
    """Of the chain's path."""


class LlamaServerDraft(ServerSource):
    """Drafts in the context's sequences; a session gets one with its first draft and keeps it until `release`."""

    name = "gguf"

    def __init__(
        self,
        chains: ChainContext,
        *,
        depth: int,
        vocabulary: int,
        unlike: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Never propose ids beyond the target's `vocabulary`, or those of `unlike`."""
        super().__init__()
        self._chains = chains
        self._depth = depth
        self._shared = min(vocabulary, chains.vocab_size)
        self._unlike = list(unlike)
        self._narrow = False
        """Whether the log says that a session has ids which the draft lacks."""
        self._free = list(range(chains.count - 1, -1, -1))
        self._sequences: dict[str, _Sequence] = {}
        self._refused: set[str] = set()
        """Sessions that cannot be drafted for any more."""
        self._clock = clock
        self._level_s = MovingAverage()
        """Seconds of one level, which all sessions share."""
        self._read_token_s = MovingAverage()
        """Seconds in which a token of a prompt is read."""

    def propose(self, requests: Sequence[ProposalRequest]) -> dict[str, ProposedTree]:
        """Draft a tree for each session that can be drafted for, by id: one decode per level for all of them."""
        self.read_s = 0.0
        growing, rows = self._catch_up(requests)
        trees = {one.request.session.session_id: one.tree for one in growing}
        reached = float(len(growing))
        for depth in range(self._depth):
            growing = [one for one, row in zip(growing, rows, strict=True) if self._extend(one, row)]
            before, reached = reached, sum(one.acceptance for one in growing)
            if not growing or depth + 1 == self._depth:
                break
            if not level_pays(self._level_s.value, reached, before, growing[0].request.token_s):
                break
            begun = self._clock()
            rows = self._chains.feed([(one.sequence.number, one.path[-1:]) for one in growing])
            self._level_s.add(self._clock() - begun)
            for one in growing:
                one.sequence.drafted.append(one.path[-1])
        return trees

    def release(self, session_id: str) -> None:
        """Free the sequence of a session that has ended."""
        self._refused.discard(session_id)
        sequence = self._sequences.pop(session_id, None)
        if sequence is not None:
            self._chains.truncate(sequence.number, 0)
            self._free.append(sequence.number)

    def _catch_up(self, requests: Sequence[ProposalRequest]) -> tuple[list[_Draft], Logits | list[Logits]]:
        """Read what was committed since; return sessions that are up to date, and their last logits `[n, V]`."""
        drafts = [
            _Draft(one, sequence, self._unread(sequence, one.session), ProposedTree(one.session.protocol.position))
            for one in requests
            if (sequence := self._sequence_of(one)) is not None
        ]
        left = PROMPT_TOKENS + USUAL_TOKENS * len(drafts)
        feeds: list[tuple[int, Sequence[int]]] = []
        growing: list[_Draft] = []
        # The shortest first, so that only sessions with a prompt to read wait.
        for draft in sorted(drafts, key=lambda one: len(one.unread)):
            now = draft.unread[:left]
            if not now:
                break
            left -= len(now)
            draft.sequence.agreed += len(now)
            feeds.append((draft.sequence.number, now))
            if len(now) == len(draft.unread):
                growing.append(draft)
        return growing, self._read(feeds)[: len(growing)] if feeds else []

    def _read(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Logits:
        """Decode once; its time counts as proposing and as reading in proportion to their tokens."""
        begun = self._clock()
        rows = self._chains.feed(feeds)
        tokens = sum(len(now) for _, now in feeds)
        usual = min(self._depth, USUAL_TOKENS)  # a session that is drafted for in every step has to read these
        more = sum(len(now) - usual for _, now in feeds if len(now) > USUAL_TOKENS)
        token_s = (self._clock() - begun) / tokens
        self.read_s = token_s * more
        if more:
            self._read_token_s.add(token_s)
        return rows

    def _sequence_of(self, request: ProposalRequest) -> _Sequence | None:
        """Return the session's sequence; None if none is free, if the context or vocabulary lacks its tokens, or if
        reading them takes longer than the target takes for what is left to generate."""
        session = request.session
        if session.session_id in self._refused:
            return None
        sequence = self._sequences.get(session.session_id)
        new = session.tokens[sequence.agreed if sequence else 0 :]
        read_s = len(new) * self._read_token_s.value if len(new) > USUAL_TOKENS else 0.0
        too_long = len(session.tokens) + self._depth > self._chains.length or read_s > session.left * request.token_s
        if too_long or max(new) >= self._shared:
            if not too_long and not self._narrow:
                self._narrow = True
                log.warning("the server draft has %d ids: sessions with larger ones go without it", self._shared)
            self.release(session.session_id)
            self._refused.add(session.session_id)
            return None
        if sequence is None and self._free:
            sequence = self._sequences[session.session_id] = _Sequence(self._free.pop())
        return sequence

    def _unread(self, sequence: _Sequence, session: EngineSession) -> Sequence[int]:
        """Drop what was drafted wrong, and return the tokens to read."""
        new = session.tokens[sequence.agreed :]
        accepted = 0
        while accepted < min(len(sequence.drafted), len(new) - 1) and sequence.drafted[accepted] == new[accepted]:
            accepted += 1
        sequence.agreed += accepted
        sequence.drafted = []
        self._chains.truncate(sequence.number, sequence.agreed)
        return new[accepted:]

    def _extend(self, one: _Draft, row: Logits) -> bool:
        """Add children of the chain's tip by its logits `[V]`, the first of which becomes the tip; return whether the
        chain goes on below it."""
        session, sampler = one.request.session, one.request.session.sampler
        if len(one.path) + 1 >= session.left:
            return False
        position = session.protocol.position + len(one.path)
        logits = without_early_ends(row[: self._shared], session, position)
        if self._unlike:
            logits = logits.copy()
            logits[self._unlike] = -np.inf
        children = propose(logits, sampler.params, sampler.key, position, sampler.counts, one.path, CHILDREN)
        if not children:
            return False
        nodes = [one.tree.propose(one.tip, child.token, kind_of(child.margin)) for child in children]
        one.tip = nodes[0]
        one.path.append(children[0].token)
        one.acceptance *= one.request.acceptance.estimate(one.tree.kinds[one.tip], 0)
        return one.acceptance >= one.request.floor and not session.protocol.ends(children[0].token, position)
