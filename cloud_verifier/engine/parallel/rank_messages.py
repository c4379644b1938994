"""Encode what rank 0 has the other ranks compute as int32 tensors, and broadcast it: no pickle, nothing but numbers.

A message is two broadcasts: `[kind, count]` and, unless count is 0, that many numbers.
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
class Forward:
    """A packed forward pass.

    pool: number of the KV pool; a greater one than before means a new pool, of `pool_slots` slots.
    """

    pool: int
    pool_slots: int
    segments: tuple[Segment, ...]
    logit_rows: Numbers

    @classmethod
    def of(cls, batch: PackedBatch, pool: int, pool_slots: int) -> Forward:
        return cls(pool, pool_slots, batch.segments, batch.logit_rows.cpu().numpy().astype(np.int32))

    def batch(self, device: torch.device) -> PackedBatch:
        """Return the batch that rank 0 packed."""
        rows = torch.from_numpy(self.logit_rows.astype(np.int64)).to(device)
        return replace(PackedBatch.pack(self.segments, device), logit_rows=rows)


RankMessage = Forward | list[int] | None
"""A packed forward pass; token ids for a plain one, as the numerics check needs; or None as the last message."""
_END, _LINEAR, _FORWARD = range(3)


def send(message: RankMessage, channel: Any) -> None:
    """Broadcast a message from rank 0. Raises RuntimeError if a rank has gone."""
    kind, numbers = encode(message)
    dist.broadcast(torch.tensor([kind, len(numbers)], dtype=torch.int32), src=0, group=channel)
    if len(numbers):
        dist.broadcast(torch.from_numpy(numbers), src=0, group=channel)


def receive(channel: Any) -> RankMessage:
    """Wait for the next message of rank 0, however long it takes. Raises RuntimeError if rank 0 has gone."""
    header = torch.empty(2, dtype=torch.int32)
    dist.broadcast(header, src=0, group=channel)
    kind, count = header.tolist()
    numbers = torch.empty(count, dtype=torch.int32)
    if count:
        dist.broadcast(numbers, src=0, group=channel)
    return decode(kind, numbers.numpy())


def encode(message: RankMessage) -> tuple[int, Numbers]:
    """Return the message as (kind, numbers)."""
    match message:
        case None:
            return _END, np.empty(0, dtype=np.int32)
        case list():
            return _LINEAR, np.asarray(message, dtype=np.int32)
        case Forward(pool, pool_slots, segments, logit_rows):
            parts = [np.asarray([pool, pool_slots, len(segments), len(logit_rows)]), logit_rows]
            for s in segments:
                parts.append(np.asarray([s.rows, s.chain, s.start, s.wants_logits]))
                parts += [s.tokens, s.parents, s.positions, s.prefix, s.slots]
            return _FORWARD, np.concatenate(parts).astype(np.int32)


def decode(kind: int, numbers: Numbers) -> RankMessage:
    """Reverse `encode`. Raises InternalError for what it cannot have made."""
    match kind:
        case 0:
            return None
        case 1:
            ids: list[int] = numbers.tolist()
            return ids
        case 2:
            return _decode_forward(numbers)
    raise InternalError(f"a rank message of kind {kind} came, must be 0 to 2: the ranks do not run the same version")


def _decode_forward(numbers: Numbers) -> Forward:
    position = 0

    def take(count: int) -> Numbers:
        nonlocal position
        taken = numbers[position : position + max(0, count)]
        if len(taken) != count:
            raise InternalError(f"a rank message has {len(numbers)} numbers, which is too few")
        position += count
        return taken

    pool, pool_slots, count, wanted = take(4).tolist()
    logit_rows = take(wanted)
    segments = []
    for _ in range(count):
        rows, chain, start, wants_logits = take(4).tolist()
        tokens, parents, positions = (take(n).astype(np.int64) for n in (rows, rows - chain, rows))
        segments.append(Segment(tokens, chain, parents, positions, take(start), take(rows), bool(wants_logits)))
    if position != len(numbers):
        raise InternalError(f"a rank message has {len(numbers)} numbers, must be {position}")
    return Forward(pool, pool_slots, tuple(segments), logit_rows)
