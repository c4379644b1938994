"""Compute the same tokens in random compositions (chunks, trees, other sessions' rows) and one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, SlotTable
from cloud_verifier.engine.torch_backend.model import TargetModel

CHAINS = (1, 4, 40, 256)
"""Greatest lengths of a step's chain: a plain step, accepted tokens of a tree, a chunk of a prompt, a long chunk."""
LONGEST_PATH = 6
LONELY = 0.3
"""Share of the steps that hold one session only."""


@dataclass(frozen=True)
class ComputedRow:
    """Hold one row of a composition, which stands for a position of a sequence."""

    sequence: int
    position: int
    logits: torch.Tensor
    """`[V]`"""


def decode(model: TargetModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the reference logits, `[T, V]`, by one-token decode."""
    pool = pool_for(model, len(tokens))
    slots = pool.allocate(len(tokens))
    rows = []
    for position, token in enumerate(tokens):
        segment = _chain(np.array([token]), slots[:position], slots[position : position + 1])
        rows += _logits(model, pool, [segment])
    return torch.cat(rows)


def compose(model: TargetModel, sequences: Sequence[Sequence[int]], rng: np.random.Generator) -> Iterator[ComputedRow]:
    """Compute every sequence in random chunks and trees, several to a step; every position occurs at least once."""
    pool = pool_for(model, 2 * sum(map(len, sequences)) + 64 * len(sequences))
    readers = [_SequenceReader(model, pool, tokens, rng) for tokens in sequences]
    while left := [i for i, reader in enumerate(readers) if not reader.done]:
        chosen = [int(rng.choice(left))] if rng.random() < LONELY else rng.permutation(left).tolist()
        segments = [readers[i].segment() for i in chosen]
        logits = _logits(model, pool, segments)
        for i, segment, rows in zip(chosen, segments, logits, strict=True):
            for row in readers[i].followed:
                yield ComputedRow(i, int(segment.positions[row]), rows[row])
            readers[i].keep(segment)


def crowd(model: TargetModel, sequences: Sequence[Sequence[int]], rows: int) -> Iterator[ComputedRow]:
    """Compute one step of exactly `rows` rows: every sequence from its beginning, repeated until the step is full."""
    pool = pool_for(model, rows)
    chosen: list[int] = []
    segments: list[Segment] = []
    while left := rows - sum(segment.rows for segment in segments):
        chosen.append(len(chosen) % len(sequences))
        tokens = np.array(sequences[chosen[-1]][:left])
        segments.append(_chain(tokens, np.empty(0, dtype=np.int64), pool.allocate(len(tokens))))
    for i, logits in zip(chosen, _logits(model, pool, segments), strict=True):
        for position, row in enumerate(logits):
            yield ComputedRow(i, position, row)


def _chain(tokens: np.ndarray, prefix: np.ndarray, slots: np.ndarray) -> Segment:
    """Return a segment of the tokens that follow those in the prefix."""
    return Segment(
        tokens=tokens,
        chain=len(tokens),
        parents=np.empty(0, dtype=np.int64),
        positions=len(prefix) + np.arange(len(tokens)),
        prefix=prefix,
        slots=slots,
        wants_logits=True,
    )


def _logits(model: TargetModel, pool: KVPool, segments: Sequence[Segment]) -> Sequence[torch.Tensor]:
    """Return the logits of each segment, `[rows, V]`."""
    batch = PackedBatch.pack(segments, model.device)
    every_row = torch.arange(batch.input_ids.shape[1], device=model.device)
    logits = model.forward(replace(batch, logit_rows=every_row), model.attention.plan(segments, pool))
    return logits.split([segment.rows for segment in segments])  # type: ignore[no-untyped-call]


def pool_for(model: TargetModel, slots: int) -> KVPool:
    return KVPool(model.layers, slots, dtype=model.torch_dtype, device=model.device)


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the number of bits in which two tensors of one floating type differ."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    difference = (a.contiguous().view(kind) ^ b.contiguous().view(kind)).cpu().numpy()
    return int(np.unpackbits(difference.view(np.uint8)).sum())


class _SequenceReader:
    """Read a sequence into the pool in several segments."""

    def __init__(self, model: TargetModel, pool: KVPool, tokens: Sequence[int], rng: np.random.Generator) -> None:
        self._vocab = model.vocab_size
        self._pool = pool
        self._tokens = tokens
        self._rng = rng
        self._table = SlotTable()
        self.followed: list[int] = []
        """Rows of the last segment that stand for tokens of the sequence."""

    @property
    def done(self) -> bool:
        return len(self._table) == len(self._tokens)

    def segment(self) -> Segment:
        """Return a segment of a chain of tokens and, below it, the next ones as a path among random other nodes."""
        start, rng = len(self._table), self._rng
        left = len(self._tokens) - start
        chain = int(rng.integers(1, min(left, int(rng.choice(CHAINS))) + 1))
        path = int(rng.integers(0, min(left - chain, LONGEST_PATH) + 1))
        tokens = list(self._tokens[start : start + chain])
        positions = list(range(start, start + chain))
        parents: list[int] = []
        self.followed = list(range(chain))
        while len(self.followed) < chain + path or rng.random() < 0.6:
            row = len(tokens)
            if len(self.followed) < chain + path and rng.random() < 0.5:
                parents.append(self.followed[-1])
                tokens.append(self._tokens[start + len(self.followed)])
                self.followed.append(row)
            else:
                parents.append(int(rng.integers(chain - 1, row)))
                tokens.append(int(rng.integers(0, self._vocab)))
            positions.append(positions[parents[-1]] + 1)
        return Segment(
            tokens=np.array(tokens),
            chain=chain,
            parents=np.array(parents, dtype=np.int64),
            positions=np.array(positions),
            prefix=self._table.slots.copy(),
            slots=self._pool.allocate(len(tokens)),
            wants_logits=True,
        )

    def keep(self, segment: Segment) -> None:
        """Keep the chain and some of the path; the rest of the path will be computed again."""
        count = int(self._rng.integers(segment.chain, len(self.followed) + 1))
        rows = self.followed[:count]
        self._table.extend(segment.slots[rows])
        self._pool.release(np.delete(segment.slots, rows))
