"""What the target produced in recorded sessions, with its distributions: gathered behind a step's commits.

A step only notes which rows of its logits recorded sessions visited. What is to be told of them is computed at once for
all, when the commits have gone out, and comes to the host in one copy. Whatever fails here costs recordings, which are
counted, and never a session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.logprobs import likeliest
from cloud_verifier.engine.session import EngineSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import Verified

log = logging.getLogger(__name__)

LEAST_LOG_PROB = -1e4
"""In place of the logarithm of 0, which no loss could take."""
CHUNK_BYTES = 32 << 20
"""Of logits in float32 that are looked at together: there are up to three copies of them meanwhile."""


@dataclass(frozen=True)
class Visit:
    """One session's walk in one step."""

    session_id: str
    epoch: int
    draft: str
    """Release that its device drafts with."""
    start: int
    """Position of the first token."""
    tokens: tuple[int, ...]
    guessed: bytes
    """Per token the depth (1..255) at which the device's guess for it was right, 0 where none was."""
    rows: tuple[int, ...]
    """Per token the row of the step's logits that gave it."""


@dataclass(frozen=True, eq=False)
class Produced:
    """A visit, and what the target found likely there: its own distribution, before penalties, temperature, filters."""

    visit: Visit
    top_ids: NDArray[np.uint32]
    """`[n, K]`, the likeliest first; K is the vocabulary's size where that is less."""
    top_log_probs: NDArray[np.float32]
    """`[n, K]`"""
    tail: NDArray[np.float32]
    """`[n]`: probability of all other ids."""


class Recording:
    """Walks of recorded sessions in the last step, until somebody asks for them."""

    def __init__(self, top: int) -> None:
        """top: K."""
        self._top = top
        self._visits: list[tuple[torch.Tensor, Visit]] = []
        """Walks, each with the logits `[R, V]` of its forward pass, which live as long as this."""
        self.lost = 0
        """Tokens that cannot be told of, since something failed here."""

    def clear(self) -> None:
        """A new step begins: what nobody has asked for is gone."""
        self._visits.clear()

    def note(self, session: EngineSession, verified: Verified, logits: torch.Tensor, first_row: int) -> None:
        """A walk that is not yet committed. logits: `[R, V]` of the whole step; first_row: the session's. Raises
        nothing."""
        protocol, tokens = session.protocol, verified.tokens
        try:
            rows = tuple(first_row + row for row in (0, *verified.rows)[: len(tokens)])
            guessed = depths_right(protocol.tree, tokens)
            visit = Visit(session.session_id, protocol.epoch, session.draft, protocol.position, tokens, guessed, rows)
            self._visits.append((logits, visit))
        except Exception:
            self._lose(len(tokens))

    def take(self) -> list[Produced]:
        """All that was noted since the step began, each once. Waits for the accelerator. Raises nothing: where it
        fails, all of it is lost."""
        noted, self._visits = self._visits, []
        if not noted:
            return []
        try:
            top_ids, top_log_probs, tail = _told(noted, self._top)
        except Exception:  # no memory, above all
            self._lose(sum(len(visit.tokens) for _, visit in noted))
            return []
        told, at = [], 0
        for _, visit in noted:
            part = slice(at, at + len(visit.tokens))
            at = part.stop
            told.append(Produced(visit, top_ids[part], top_log_probs[part], tail[part]))
        return told

    def _lose(self, tokens: int) -> None:
        """To be called where an exception is handled, which is told of once: the count says how it goes on."""
        if not self.lost:
            log.exception("%d tokens cannot be recorded, and maybe more from here on", tokens)
        self.lost += tokens


def depths_right(tree: TokenTree, tokens: Sequence[int]) -> bytes:
    """Per token the depth (1..255) of the node that guessed it right, below the tree's root; 0 where none did."""
    depths = bytearray(len(tokens))
    node = ROOT
    for index, token in enumerate(tokens):
        child = tree.child(node, token)
        if child is None:
            break
        node = child
        depths[index] = min(index + 1, 255)
    return bytes(depths)


_Told = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]


@torch.inference_mode()
def _told(noted: Sequence[tuple[torch.Tensor, Visit]], top: int) -> _Told:
    """Of all their tokens, one after the other."""
    parts = []
    for _, steps in groupby(noted, key=lambda one: id(one[0])):
        visits = list(steps)
        logits, rows = visits[0][0], [row for _, visit in visits for row in visit.rows]
        most = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
        for begin in range(0, len(rows), most):
            some = torch.tensor(rows[begin : begin + most])
            parts.append(_packed(logits.index_select(0, some.to(logits.device)), top))
    return _unpacked(torch.cat(parts))


def _packed(logits: torch.Tensor, top: int) -> torch.Tensor:
    """`[n, K + K + 1]`; a float32 has every id, since they are below MAX_VOCABULARY, 2^24."""
    ids, log_probs, _ = likeliest(logits, top)
    log_probs = log_probs.clamp_min(LEAST_LOG_PROB)
    tail = (1.0 - log_probs.exp().sum(dim=1, keepdim=True)).clamp_min(0.0)
    return torch.cat([ids.float(), log_probs, tail], dim=1)


def _unpacked(packed: torch.Tensor) -> _Told:
    """On the host, in one copy."""
    told = packed.cpu().numpy()
    count = told.shape[1] // 2
    return told[:, :count].astype(np.uint32), told[:, count:-1], told[:, -1]
