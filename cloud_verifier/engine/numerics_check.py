"""At load: do packed trees over slots give the logits of a plain forward? A model that does not is refused.

Two sessions are prefilled in chunks of different length within the same forwards; then each has a branching tree, a
path of it is accepted by bookkeeping, and the next tree stands on slots that are no longer adjacent. Every node's
logits are compared with those of transformers' own attention over the node's whole path. With exact attention a
sequence's bits are besides compared between steps of one row and of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cloud_verifier.engine.batch import Ints, PackedBatch, Segment
from cloud_verifier.engine.kv_pool import KVPool, Slots, SlotTable
from cloud_verifier.engine.model import TargetModel
from outrider.core.errors import ModelRefused

FLOAT32_BOUND = 1e-3
"""Greatest difference of any logit in float32; models that work show 1e-6 to 1e-4."""
HALF_BOUND = 0.06
"""In bfloat16 and float16, as a share of the greatest logit, for the median row: a router near a tie may send a token
to another expert, which moves single rows far, while a wrong mask or position moves nearly all."""
TREE = (-1, -1, 0, 0, 1, 2, 2, 5)
"""Parents of the nodes, -1 for the root: two branches, siblings at three depths."""
PATH = (0, 2, 5, 7)
"""The nodes accepted: a root's child down to a leaf, past siblings."""
PROMPTS = (37, 22)
CHUNKS = (16, 9)
TREES = 2
KNOWN = 52
"""Tokens before those whose bits are compared, computed once: with the others they are more than a block of keys."""
COMPARED = 24
"""Tokens of a sequence whose bits are compared."""
CROWDS = (20, 40, 64, 128)
"""Rows of the steps in which they are, besides the most that a step may have: libraries choose kernels by size."""


def self_test(model: TargetModel, *, rows: int = 512, seed: int = 0) -> float:
    """The deviation of the logits; raises ModelRefused above the bound. Marks the model as tested.

    rows: the most that a step will have.
    """
    rng = np.random.default_rng(seed)
    pool = KVPool(model.layers, 256, dtype=model.torch_dtype, device=model.device)
    sequences = [_Sequence(model, pool, length, rng) for length in PROMPTS]
    try:
        by_row, greatest = _compare(model, pool, sequences)
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"{model.label} fails on packed trees: {type(error).__name__}: {error}") from error
    exact = model.torch_dtype == torch.float32
    deviation = float(np.max(by_row) if exact else np.median(by_row))
    bound = FLOAT32_BOUND if exact else HALF_BOUND * max(1.0, greatest)
    if not deviation <= bound:  # also where it is no number
        raise ModelRefused(
            f"{model.label} cannot be served: the logits of a tree and of plain sequences differ by {deviation:.2e}, "
            f"must be at most {bound:.2e} in {model.dtype}"
        )
    if model.attention.name == "exact":
        _check_bits(model, rows)
    model.deviation = deviation
    return deviation


def _compare(model: TargetModel, pool: KVPool, sequences: Sequence[_Sequence]) -> tuple[list[float], float]:
    """(greatest deviation in each row compared, greatest magnitude of a logit)."""
    by_row: list[float] = []
    greatest = 0.0
    for _ in range(_chunks_needed() + TREES):
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


def _check_bits(model: TargetModel, most_rows: int) -> None:
    """The same tokens one by one, and in steps of several sizes where some sessions have all of them and one a part."""
    pool = KVPool(model.layers, KNOWN + COMPARED + most_rows, dtype=model.torch_dtype, device=model.device)
    tokens = np.arange(KNOWN + COMPARED) % model.vocab_size
    prefix = pool.allocate(KNOWN)
    _logits(model, pool, [_chain(tokens[:KNOWN], prefix[:0], prefix)])
    tokens = tokens[KNOWN:]
    alone = _one_by_one(model, pool, tokens, prefix)
    for rows in sorted({*(size for size in CROWDS if size < most_rows), most_rows}):
        lengths = [min(COMPARED, rows - first) for first in range(0, rows, COMPARED)]
        segments = [_chain(tokens[:length], prefix, pool.allocate(length)) for length in lengths]
        together = torch.split(_logits(model, pool, segments), lengths)
        if not all(torch.equal(logits, alone[: len(logits)]) for logits in together):
            raise ModelRefused(
                f"{model.label} cannot be served with exact attention in {model.dtype} on {model.hardware}: in a step "
                f"of {rows} rows some part of it gives a token other bits than alone; use sdpa"
            )
        pool.release(np.concatenate([segment.slots for segment in segments]))


def _one_by_one(model: TargetModel, pool: KVPool, tokens: Ints, prefix: Slots) -> torch.Tensor:
    """`[T, V]`: every token in a step of its own."""
    slots = np.concatenate([prefix, pool.allocate(len(tokens))])
    return torch.cat(
        [
            _logits(model, pool, [_chain(tokens[i : i + 1], slots[: len(prefix) + i], slots[len(prefix) + i :][:1])])
            for i in range(len(tokens))
        ]
    )


def _chain(tokens: Ints, prefix: Slots, slots: Slots) -> Segment:
    """Tokens after those that the prefix holds."""
    positions, none = len(prefix) + np.arange(len(tokens)), np.empty(0, dtype=np.int64)
    return Segment(tokens, len(tokens), none, positions, prefix, slots, True)


def _logits(model: TargetModel, pool: KVPool, segments: Sequence[Segment]) -> torch.Tensor:
    """`[T, V]`: of every row."""
    batch = PackedBatch.pack(segments, model.device)
    every_row = torch.arange(batch.input_ids.shape[1], device=model.device)
    return model.forward(replace(batch, logit_rows=every_row), model.attention.plan(segments, pool))


def _chunks_needed() -> int:
    """Steps until the slower sequence has its prompt, all but the last token, in the pool."""
    return max(-(-(prompt - 1) // chunk) for prompt, chunk in zip(PROMPTS, CHUNKS, strict=True))


class _Sequence:
    """A random prompt, then random trees."""

    def __init__(self, model: TargetModel, pool: KVPool, length: int, rng: np.random.Generator) -> None:
        self._model = model
        self._pool = pool
        self._rng = rng
        self._tokens: list[int] = rng.integers(0, model.vocab_size, length).tolist()
        self._table = SlotTable()
        self._nodes: list[int] = []

    def chunk(self, rows: int) -> Segment | None:
        """The next piece of the prompt; None where only the last token is left."""
        have = len(self._table)
        rows = min(rows, len(self._tokens) - 1 - have)
        return self._segment(rows, [], wants_logits=False) if rows > 0 else None

    def tree(self) -> Segment:
        """The last token and a new random tree below it."""
        self._nodes = self._rng.integers(0, self._model.vocab_size, len(TREE)).tolist()
        return self._segment(1, self._nodes, wants_logits=True)

    def expected(self) -> torch.Tensor:
        """`[1 + nodes, V]`: a plain forward's logits at the last token and at every node."""
        rows: dict[int, torch.Tensor] = {}
        for leaf in set(range(len(TREE))) - set(TREE):
            path = [leaf]
            while TREE[path[0]] >= 0:
                path.insert(0, TREE[path[0]])
            logits = self._model.linear_logits(self._tokens + [self._nodes[node] for node in path])
            rows |= dict(zip([-1, *path], logits[-1 - len(path) :], strict=True))
        return torch.stack([rows[node] for node in range(-1, len(TREE))]).float()

    def keep(self, segment: Segment) -> None:
        """The chain stays; of a tree one path is accepted and one more token follows, as after a walk."""
        if not segment.wants_logits:
            self._table.extend(segment.slots)
            return
        rows = [0, *(node + 1 for node in PATH)]
        self._table.extend(segment.slots[rows])
        self._pool.release(np.delete(segment.slots, rows))
        self._tokens += [self._nodes[node] for node in PATH]
        self._tokens.append(int(self._rng.integers(0, self._model.vocab_size)))

    def _segment(self, chain: int, nodes: list[int], *, wants_logits: bool) -> Segment:
        start = len(self._table)
        depths: list[int] = []
        for parent in TREE[: len(nodes)]:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        positions = [*range(start, start + chain), *(start + chain - 1 + depth for depth in depths)]
        return Segment(
            tokens=np.asarray(self._tokens[start : start + chain] + nodes, dtype=np.int64),
            chain=chain,
            parents=np.asarray([chain + parent for parent in TREE[: len(nodes)]], dtype=np.int64),
            positions=np.asarray(positions, dtype=np.int64),
            prefix=self._table.slots.copy(),
            slots=self._pool.allocate(chain + len(nodes)),
            wants_logits=wants_logits,
        )
