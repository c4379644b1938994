"""Measure a file of heads on texts that the target wrote, in the same shapes as drafts (eval_gguf.py).

Unlike a draft's, a prediction of heads depends on how far ahead it is, so that each level of a tree has ranks of its
own. Heads that none were served before are compared with plain steps of one token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_verifier.distill.data.texts import Text
from cloud_verifier.distill.gguf.eval_gguf import (
    CHAIN,
    CONTEXT,
    TREE,
    UNPROMPTED,
    DraftComparison,
    DraftCounts,
    TextComparison,
    TokenRanks,
    steps,
)
from cloud_verifier.distill.training.heads_student import HeadsStudent, load_target
from cloud_verifier.engine.server_draft.head_models import EagleHead, load_heads

_ROUNDS = 25


def compare(candidate: Path, incumbent: Path | None, target: Path, texts: Iterable[Text]) -> DraftComparison:
    """Measure two files of heads on the same texts. incumbent: None if no heads are served yet.

    target: the folder of their target. Raises ModelRefused for heads of another one, and for damaged files.
    """
    module, identity = load_target(target)
    new = HeadsStudent(module, load_heads(candidate, identity), identity).eval()
    old = HeadsStudent(module, load_heads(incumbent, identity), identity).eval() if incumbent is not None else None
    compared = []
    for text in texts:
        tokens, first = text.tokens[:CONTEXT], max(text.first, UNPROMPTED)
        if first < len(tokens):
            begun = text.first
            counts = _counts(new, tokens, begun, first)
            before = _counts(old, tokens, begun, first) if old is not None else _plain(len(tokens) - first)
            compared.append(TextComparison(text.traffic_class, text.session, len(tokens) - first, counts, before))
    ms = _drafting_ms(new)
    return DraftComparison(tuple(compared), ms, _drafting_ms(old) if old is not None else ms)


def _plain(positions: int) -> DraftCounts:
    return DraftCounts(0, positions, positions)


@torch.no_grad()
def _counts(student: HeadsStudent, tokens: Any, begun: int, first: int) -> DraftCounts:
    """Count what heads predict of the tokens from `first` on, with the target's states from `begun` on."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    labels = torch.full_like(ids, -1)
    labels[0, begun - 1 :] = 1
    states = student.read(ids, labels)[:, begun - 1 :]
    ids, labels = ids[:, begun - 1 :], labels[:, begun - 1 :]
    count = ids.shape[1]
    # The token at column c; columns that nothing predicts are never guessed.
    ranks = np.full((CHAIN, count), TREE, np.int8)
    for level, (predicted, offset, behind) in enumerate(student.predictions(states, ids, labels, CHAIN)[:CHAIN]):
        known = predicted[0, behind : count - offset - 1]
        if len(known):
            ranks[level, behind + offset + 1 :] = _ranks(student.logits(known), ids[0, behind + offset + 1 :])
    ranks = ranks[:, first - (begun - 1) :]
    return DraftCounts(int((ranks[0] == 0).sum()), steps(ranks, CHAIN, 1), steps(ranks, CHAIN, TREE))


def _ranks(logits: torch.Tensor, actual: torch.Tensor) -> TokenRanks:
    """Return each token's rank among the choices of its row, at most TREE; of equal logits the lower id is first."""
    scores = logits.gather(1, actual[:, None])
    before = (logits == scores) & (torch.arange(logits.shape[1]) < actual[:, None])
    found: TokenRanks = ((logits > scores) | before).sum(1).clamp_max(TREE).numpy().astype(np.int8)
    return found


@torch.no_grad()
def _drafting_ms(student: HeadsStudent) -> float:
    """Return the milliseconds of one session's chain, the least of some rounds."""
    heads, best = student.heads, float("inf")
    hidden = heads.shape.hidden
    states, ids = torch.zeros(1, 1, hidden), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        if isinstance(heads, EagleHead):
            for _ in range(heads.shape.depth):
                student.logits(student.predictions(states, ids, ids, 1)[0][0][0])
        else:
            student.logits(heads(states[0]).flatten(0, 1))
        best = min(best, time.perf_counter() - begun)
    return 1e3 * best
