"""Record the tokens that the target generates in recorded sessions, with the target's distributions.

A step only keeps its logits and notes which rows recorded sessions visited. Their distributions are computed for all of
them together, when the step's commits have been sent, and copied to the host at once. A failure here costs recorded
tokens, which are counted, and never a session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.sampling import LEAST_LOGPROB, top_logprobs
from cloud_verifier.engine.session import EngineSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import Verified
from outrider.wire.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""Size of the float32 logits that are processed together; up to three copies of them exist meanwhile."""

Distributions = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]
"""Likeliest ids `[n, K]` of the target's own distributions, before penalties, temperature and filters, by falling
probability; their log-probabilities `[n, K]`; the probability of all other ids `[n]`. K is the vocabulary's size at
most."""
_Noted = tuple[torch.Tensor, tuple[int, ...], pb.EngineEvent]
"""(logits `[R, V]` of the step's forward pass, the row of each token, the event to complete)"""


class Recording:
    """Keeps the tokens of recorded sessions until they are taken, and the logits of their steps."""

    def __init__(self, top: int) -> None:
        """Record K = `top` likeliest ids of each position."""
        self._top = top
        self._noted: list[_Noted] = []
        self.lost = 0
        """Number of tokens that were not recorded because of a failure here."""

    def note(self, session: EngineSession, verified: Verified, logits: torch.Tensor, first_row: int) -> None:
        """Keep a session's verified tokens before they are committed; never raises.

        logits: `[R, V]` of the whole step. first_row: the session's first row among them.
        """
        try:
            rows = tuple(first_row + row for row in (0, *verified.rows)[: len(verified.tokens)])
            self._noted.append((logits, rows, recorded_event(session, verified)))
        except Exception:
            self.lose(len(verified.tokens))

    def take(self) -> list[pb.EngineEvent]:
        """Return, once, what was noted since. Waits for the accelerator; never raises."""
        noted, self._noted = self._noted, []
        if not noted:
            return []
        try:
            distributions = _distributions(noted, self._top)
            end = 0
            for _, rows, event in noted:
                part = slice(end, end + len(rows))
                end = part.stop
                put_distributions(event, *(array[part] for array in distributions))
        except Exception:  # mostly for want of memory
            self.lose(sum(len(rows) for _, rows, _ in noted))
            return []
        return [event for _, _, event in noted]

    def lose(self, tokens: int) -> None:
        """Count lost tokens; must be called in an exception handler. Only the first exception is logged."""
        if not self.lost:
            log.exception("%d tokens cannot be recorded, and maybe more from here on", tokens)
        self.lost += tokens


def recorded_event(session: EngineSession, verified: Verified) -> pb.EngineEvent:
    """Return the event that carries a session's verified tokens, before they are committed; without distributions."""
    protocol = session.protocol
    recorded = pb.RecordedTokens(
        start=protocol.position,
        token=verified.tokens,
        proposed_depths=_proposed_depths(protocol.tree, verified.tokens),
        draft_release=session.draft_release,
    )
    return pb.EngineEvent(session_id=session.session_id, epoch=protocol.epoch, recorded=recorded)


def put_distributions(
    event: pb.EngineEvent, top_ids: NDArray[Any], top_log_probs: NDArray[Any], tail: NDArray[Any]
) -> None:
    """Complete an event of recorded tokens by their Distributions."""
    recorded = event.recorded
    recorded.top = top_ids.shape[1]
    recorded.top_ids = top_ids.astype("<u4").tobytes()
    recorded.top_log_probs = top_log_probs.astype("<f2").tobytes()
    recorded.tail = tail.astype("<f2").tobytes()


def _proposed_depths(tree: TokenTree, tokens: Sequence[int]) -> bytes:
    """Return per token the depth (1..255) of the node that carries it below the tree's root, 0 if none does."""
    depths = bytearray(len(tokens))
    node = ROOT
    for index, token in enumerate(tokens):
        child = tree.child(node, token)
        if child is None:
            break
        node = child
        depths[index] = min(index + 1, 255)
    return bytes(depths)


@torch.inference_mode()
def _distributions(noted: Sequence[_Noted], top: int) -> Distributions:
    """Return the distributions of all tokens, one after another, in one copy from the device."""
    parts = []
    for _, of_one_pass in groupby(noted, key=lambda one: id(one[0])):
        notes = list(of_one_pass)
        logits, rows = notes[0][0], [row for _, some, _ in notes for row in some]
        most = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
        for begin in range(0, len(rows), most):
            some = torch.tensor(rows[begin : begin + most])
            parts.append(_packed(logits.index_select(0, some.to(logits.device)), top))
    packed = torch.cat(parts).cpu().numpy()
    count = packed.shape[1] // 2
    return packed[:, :count].astype(np.uint32), packed[:, count:-1], packed[:, -1]


def _packed(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Return ids, log-probabilities and tail as `[n, K + K + 1]`; float32 is exact for ids, which are below 2^24."""
    ids, log_probs, _ = top_logprobs(logits, top)
    log_probs = log_probs.clamp_min(LEAST_LOGPROB)
    tail = (1.0 - log_probs.exp().sum(dim=1, keepdim=True)).clamp_min(0.0)
    return torch.cat([ids.float(), log_probs, tail], dim=1)
