"""Check, when a target is loaded, that packed trees over KV slots give the logits of a plain forward pass.

Two sessions are prefilled in chunks of different length within the same passes; then each has a branching tree, a path
of it is accepted by appending its slots, and the next tree follows slots that are no longer adjacent. Every node's
logits are compared with those of transformers' own attention over the node's whole path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cloud_verifier.engine.torch_backend.architecture import DEVIATING, FAILING_TREES, refused
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.session_slots import SessionSlots
from outrider.core.errors import ModelRefused
from outrider.core.verification import TreeBatch

FLOAT32_BOUND = 1e-3
"""Greatest difference of any logit in float32; models that work show 1e-6 to 1e-4."""
HALF_BOUND = 0.06
"""Greatest difference in bfloat16 and float16 for the median row, as a share of the greatest logit: a router near a tie
may send a token to another expert, which changes single rows much; a wrong mask or position changes nearly all rows."""
PARENTS = (0, 0, 1, 1, 2, 3, 3, 6)
"""Rows of the nodes' parents, the last known token's being 0: two branches, siblings at three depths."""
DEPTHS = (1, 1, 2, 2, 2, 3, 3, 4)
PATH = (1, 3, 6, 8)
"""Rows of the accepted nodes: from a child of the root down to a leaf, some of them not the first of their siblings."""
PROMPTS = {37: 16, 22: 9}
"""Tokens of each session's prompt -> of the chunks in which it is read."""
STEPS = 3 + 2
"""To read the longer prompt, and to evaluate two trees behind it."""


def check_numerics(model: TargetModel) -> float:
    """Return the deviation of the logits, and mark the model as tested. Raises ModelRefused above the bound."""
    try:
        by_row, greatest = _compare(model, np.random.default_rng(0))
    except ModelRefused:
        raise
    except Exception as error:
        raise refused(model.label, FAILING_TREES, f"{type(error).__name__}: {error}") from error
    full = model.torch_dtype == torch.float32
    deviation = float(np.max(by_row) if full else np.median(by_row))
    bound = FLOAT32_BOUND if full else HALF_BOUND * max(1.0, greatest)
    if not deviation <= bound:  # also if it is not a number
        raise refused(model.label, DEVIATING, f"by {deviation:.2e}, must be at most {bound:.2e} in {model.dtype}")
    model.deviation = deviation
    return deviation


def _compare(model: TargetModel, rng: np.random.Generator) -> tuple[list[float], float]:
    """Return (greatest deviation in each row compared, greatest magnitude of a logit)."""

    def random_tokens(count: int) -> list[int]:
        tokens: list[int] = rng.integers(0, model.vocab_size, count).tolist()
        return tokens

    pool = KVPool(model.layers, 256, dtype=model.torch_dtype, device=model.device)
    # The sessions' slots see the tokens that are appended to their texts.
    texts = [random_tokens(length) for length in PROMPTS]
    sessions = [SessionSlots(pool, text, most=pool.slots, last_position=model.max_sequence - 1) for text in texts]
    by_row, greatest = list[float](), 0.0
    for _ in range(STEPS):
        trees = [random_tokens(len(PARENTS)) for _ in texts]
        segments = []
        for text, session, nodes, chunk in zip(texts, sessions, trees, PROMPTS.values(), strict=True):
            if unread := len(text) - 1 - len(session.table):
                segments.append(session.segment(min(chunk, unread), None))
            else:
                ids = tuple(range(1, len(nodes) + 1))
                segments.append(session.segment(1, TreeBatch(ids, PARENTS, tuple(nodes), DEPTHS, 0)))
        batch = PackedBatch.pack(segments, model.device)
        logits = model.forward(batch, model.attention.plan(segments, pool)).float()
        for text, session, nodes, segment, start in zip(
            texts, sessions, trees, segments, batch.logit_starts, strict=True
        ):
            if not segment.wants_logits:
                session.keep(segment)
                continue
            session.keep(segment, PATH)
            expected = _plain_logits(model, text, nodes)
            by_row += (logits[start : start + len(expected)] - expected).abs().amax(dim=1).tolist()
            greatest = max(greatest, float(expected.abs().max()))
            text += [*(nodes[row - 1] for row in PATH), *random_tokens(1)]
    return by_row, greatest


def _plain_logits(model: TargetModel, text: list[int], nodes: Sequence[int]) -> torch.Tensor:
    """Return `[1 + nodes, V]`: a plain forward pass's logits at the last token of the text and at every node, by one
    pass over the path to each leaf."""
    rows: dict[int, torch.Tensor] = {}
    for leaf in set(range(1, len(PARENTS) + 1)) - set(PARENTS):
        path = [leaf]
        while path[0]:
            path.insert(0, PARENTS[path[0] - 1])
        logits = model.linear_logits(text + [nodes[row - 1] for row in path[1:]])
        rows |= dict(zip(path, logits[-len(path) :], strict=True))
    return torch.stack([rows[row] for row in range(len(PARENTS) + 1)]).float()
