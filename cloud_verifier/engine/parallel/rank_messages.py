"""What the leader of a group of ranks tells the others to do, as int32 tensors: no pickle, nothing but numbers.

An order is two broadcasts: `[kind, count]`, then, where count is not 0, that many numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cloud_verifier.engine.batch import PackedBatch, Segment
from outrider.core.errors import InternalError

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class End:
    """Nothing comes after it."""


@dataclass(frozen=True)
class Linear:
    """A plain forward over one sequence, for the self-test."""

    ids: list[int]


@dataclass(frozen=True)
class Forward:
    """A packed forward."""

    pool: int
    """Number of the KV pool; a greater one than before means a new pool."""
    pool_slots: int
    segments: tuple[Segment, ...]
    logit_rows: Numbers

    @classmethod
    def of(cls, batch: PackedBatch, pool: int, pool_slots: int) -> Forward:
        return cls(pool, pool_slots, batch.segments, batch.logit_rows.cpu().numpy().astype(np.int32))

    def batch(self, device: torch.device) -> PackedBatch:
        """What the leader packed."""
        rows = torch.from_numpy(self.logit_rows.astype(np.int64)).to(device)
        return replace(PackedBatch.pack(self.segments, device), logit_rows=rows)


Order = End | Linear | Forward
_END, _LINEAR, _FORWARD = range(3)


def send(order: Order, channel: Any) -> None:
    """Raises RuntimeError where a rank has gone."""
    kind, numbers = encode(order)
    dist.broadcast(torch.tensor([kind, len(numbers)], dtype=torch.int32), src=0, group=channel)
    if len(numbers):
        dist.broadcast(torch.from_numpy(numbers), src=0, group=channel)


def receive(channel: Any) -> Order:
    """The next one, however long it takes. Raises RuntimeError where the leader has gone."""
    header = torch.empty(2, dtype=torch.int32)
    dist.broadcast(header, src=0, group=channel)
    kind, count = header.tolist()
    numbers = torch.empty(count, dtype=torch.int32)
    if count:
        dist.broadcast(numbers, src=0, group=channel)
    return decode(kind, numbers.numpy())


def encode(order: Order) -> tuple[int, Numbers]:
    """(kind, numbers)"""
    match order:
        case End():
            return _END, np.empty(0, dtype=np.int32)
        case Linear(ids):
            return _LINEAR, np.asarray(ids, dtype=np.int32)
        case Forward(pool, pool_slots, segments, logit_rows):
            parts = [np.asarray([pool, pool_slots, len(segments), len(logit_rows)]), logit_rows]
            for s in segments:
                parts.append(np.asarray([s.rows, s.chain, s.start, s.wants_logits]))
                parts += [s.tokens, s.parents, s.positions, s.prefix, s.slots]
            return _FORWARD, np.concatenate(parts).astype(np.int32)


def decode(kind: int, numbers: Numbers) -> Order:
    """The reverse of `encode`. Raises InternalError for what it cannot have made."""
    match kind:
        case 0:
            return End()
        case 1:
            return Linear(numbers.tolist())
        case 2:
            return _forward(_Reader(numbers))
    raise InternalError(f"an order of kind {kind} came, must be 0 to 2: the ranks do not run the same version")


def _forward(reader: _Reader) -> Forward:
    pool, pool_slots, count, wanted = reader.take(4).tolist()
    logit_rows = reader.take(wanted)
    segments = tuple(_segment(reader) for _ in range(count))
    reader.end()
    return Forward(pool, pool_slots, segments, logit_rows)


def _segment(reader: _Reader) -> Segment:
    rows, chain, start, wants_logits = reader.take(4).tolist()
    tokens, parents, positions = (reader.take(n).astype(np.int64) for n in (rows, rows - chain, rows))
    return Segment(tokens, chain, parents, positions, reader.take(start), reader.take(rows), bool(wants_logits))


class _Reader:
    """Takes numbers off the front."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._at = 0

    def take(self, count: int) -> Numbers:
        taken = self._numbers[self._at : self._at + max(0, count)]
        if len(taken) != count:
            raise InternalError(f"an order has {len(self._numbers)} numbers, which is too few")
        self._at += count
        return taken

    def end(self) -> None:
        if self._at != len(self._numbers):
            raise InternalError(f"an order has {len(self._numbers)} numbers, must be {self._at}")
