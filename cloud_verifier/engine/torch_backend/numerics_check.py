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
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
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
TREE = (-1, -1, 0, 0, 1, 2, 2, 5)
"""Parents of the nodes, -1 for the root: two branches, siblings at three depths."""
PATH = (0, 2, 5, 7)
"""The accepted nodes: from a child of the root down to a leaf, some of them not the first of their siblings."""
PROMPTS = (37, 22)
CHUNKS = (16, 9)
TREES = 2


def check_numerics(model: TargetModel, *, seed: int = 0) -> float:
    """Return the deviation of the logits, and mark the model as tested. Raises ModelRefused above the bound."""
    rng = np.random.default_rng(seed)
    pool = KVPool(model.layers, 256, dtype=model.torch_dtype, device=model.device)
    sequences = [_Sequence(model, pool, length, rng) for length in PROMPTS]
    try:
        by_row, greatest = _compare(model, pool, sequences)
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


def _compare(model: TargetModel, pool: KVPool, sequences: Sequence[_Sequence]) -> tuple[list[float], float]:
    """Return (greatest deviation in each row compared, greatest magnitude of a logit)."""
    by_row: list[float] = []
    greatest = 0.0
    chunks = max(-(-(prompt - 1) // chunk) for prompt, chunk in zip(PROMPTS, CHUNKS, strict=True))
    for _ in range(chunks + TREES):
        segments = [s.chunk(CHUNKS[i]) or s.tree() for i, s in enumerate(sequences)]
        batch = PackedBatch.pack(segments, model.device)
        logits = model.forward(batch, model.attention.plan(segments, pool)).float()
        for sequence, segment, start in zip(sequences, segments, batch.logit_starts, strict=True):
            if segment.wants_logits:
                expected = sequence.expected()
                by_row += (logits[start : start + len(expected)] - expected).abs().amax(dim=1).tolist()
                greatest = max(greatest, float(expected.abs().max()))
            sequence.keep(segment)
    return by_row, greatest


class _Sequence:
    """A sequence of the check: a random prompt, then random trees below its last token."""

    def __init__(self, model: TargetModel, pool: KVPool, length: int, rng: np.random.Generator) -> None:
        self._model = model
        self._rng = rng
        self._tokens: list[int] = rng.integers(0, model.vocab_size, length).tolist()
        self._slots = SessionSlots(pool, self._tokens, most=pool.slots, last_position=model.max_sequence - 1)
        self._nodes: list[int] = []

    def chunk(self, rows: int) -> Segment | None:
        """Return the next piece of the prompt; None if only the last token is left."""
        rows = min(rows, len(self._tokens) - 1 - len(self._slots.table))
        return self._slots.segment(rows, None) if rows > 0 else None

    def tree(self) -> Segment:
        """Return the last token and a new random tree below it."""
        self._nodes = self._rng.integers(0, self._model.vocab_size, len(TREE)).tolist()
        depths: list[int] = []
        for parent in TREE:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        ids, rows = range(1, len(TREE) + 1), [parent + 1 for parent in TREE]
        return self._slots.segment(1, TreeBatch(tuple(ids), tuple(rows), tuple(self._nodes), tuple(depths), 0))

    def expected(self) -> torch.Tensor:
        """Return `[1 + nodes, V]`: a plain forward pass's logits at the last token and at every node."""
        rows: dict[int, torch.Tensor] = {}
        for leaf in set(range(len(TREE))) - set(TREE):
            path = [leaf]
            while TREE[path[0]] >= 0:
                path.insert(0, TREE[path[0]])
            logits = self._model.linear_logits(self._tokens + [self._nodes[node] for node in path])
            rows |= dict(zip([-1, *path], logits[-1 - len(path) :], strict=True))
        return torch.stack([rows[node] for node in range(-1, len(TREE))]).float()

    def keep(self, segment: Segment) -> None:
        """Keep the chain; of a tree accept one path, and append one more token, as a verification does."""
        if not segment.wants_logits:
            self._slots.keep(segment)
            return
        self._slots.keep(segment, [node + 1 for node in PATH])
        self._tokens += [self._nodes[node] for node in PATH]
        self._tokens.append(int(self._rng.integers(0, self._model.vocab_size)))
