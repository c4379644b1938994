"""What the target produced in recorded sessions, with its distributions: gathered behind a step's commits.

A step only notes which rows of its logits recorded sessions visited. What is to be told of them is computed at once for
all, when the commits have gone out, and comes to the host in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.session import EngineSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.walk import Walked

LEAST_LOG_PROB = -1e4
"""In place of the logarithm of 0, which no loss could take."""


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
        self._visits: list[tuple[torch.Tensor, list[Visit]]] = []
        """By forward pass: its logits `[R, V]`, which live as long as this, and the walks through them."""

    def clear(self) -> None:
        """A new step begins: what nobody has asked for is gone."""
        self._visits.clear()

    def note(self, session: EngineSession, walked: Walked, logits: torch.Tensor, first_row: int) -> None:
        """A walk that is not yet committed. logits: `[R, V]` of the whole step; first_row: the session's."""
        if not self._visits or self._visits[-1][0] is not logits:
            self._visits.append((logits, []))
        protocol, tokens = session.protocol, walked.tokens
        rows = tuple(first_row + row for row in (0, *walked.rows)[: len(tokens)])
        guessed = depths_right(protocol.tree, tokens)
        visit = Visit(session.session_id, protocol.epoch, session.draft, protocol.position, tokens, guessed, rows)
        self._visits[-1][1].append(visit)

    def take(self) -> list[Produced]:
        """All that was noted since the step began, each once. Waits for the accelerator."""
        noted, self._visits = self._visits, []
        if not noted:
            return []
        rows = torch.cat([_visited(logits, visits) for logits, visits in noted])
        top_ids, top_log_probs, tail = distributions(rows, self._top)
        told, at = [], 0
        for visit in (visit for _, visits in noted for visit in visits):
            part = slice(at, at + len(visit.tokens))
            at = part.stop
            told.append(Produced(visit, top_ids[part], top_log_probs[part], tail[part]))
        return told


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


def _visited(logits: torch.Tensor, visits: Sequence[Visit]) -> torch.Tensor:
    rows = torch.tensor([row for visit in visits for row in visit.rows])
    return logits.index_select(0, rows.to(logits.device))


@torch.inference_mode()
def distributions(
    logits: torch.Tensor, top: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]:
    """The likeliest ids `[n, K]` of each row, their log-probabilities, and the probability `[n]` of the others.

    logits: `[n, V]`. What is computed is the float32 log-softmax, of which only these K are written down.
    """
    logits = logits.float()
    best, ids = logits.topk(min(top, logits.shape[1]), dim=1)
    log_probs = (best - logits.logsumexp(dim=1, keepdim=True)).clamp_min(LEAST_LOG_PROB)
    tail = (1.0 - log_probs.exp().sum(dim=1, keepdim=True)).clamp_min(0.0)
    # In one copy: a float32 has every id, since they are below MAX_VOCABULARY, 2^24.
    told = torch.cat([ids.float(), log_probs, tail], dim=1).cpu().numpy()
    count = best.shape[1]
    return told[:, :count].astype(np.uint32), told[:, count:-1], told[:, -1]
