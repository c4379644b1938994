"""Encode what rank 0 has the other ranks compute as int32 tensors, and broadcast it: no pickle, nothing but numbers.

A message is two broadcasts: `[kind, count]` and that many numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from outrider.core.errors import InternalError

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Forward:
    """A packed forward pass that all ranks run.

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
    dist.broadcast(torch.from_numpy(numbers), src=0, group=channel)


def receive(channel: Any) -> RankMessage:
    """Wait for the next message of rank 0, however long it takes. Raises RuntimeError if rank 0 has gone."""
    header = torch.empty(2, dtype=torch.int32)
    dist.broadcast(header, src=0, group=channel)
    kind, count = header.tolist()
    numbers = torch.empty(count, dtype=torch.int32)
    dist.broadcast(numbers, src=0, group=channel)
    return decode(kind, numbers.numpy())


def encode(message: RankMessage) -> tuple[int, Numbers]:
    """Return the message as (kind, numbers): the number of its arrays, their lengths, and the arrays one by one."""
    kind, arrays = _END, list[NDArray[np.integer[Any]]]()
    match message:
        case list():
            kind, arrays = _LINEAR, [np.asarray(message)]
        case Forward(pool, pool_slots, segments, logit_rows):
            kind, arrays = _FORWARD, [np.asarray([pool, pool_slots]), logit_rows]
            for s in segments:
                arrays += [np.asarray([s.chain, s.wants_logits]), s.tokens, s.parents, s.positions, s.prefix, s.slots]
    lengths = np.asarray([len(arrays), *map(len, arrays)])
    return kind, np.concatenate([lengths, *arrays]).astype(np.int32)


def decode(kind: int, numbers: Numbers) -> RankMessage:
    """Reverse `encode`. Raises InternalError for what it cannot have made."""
    first = 1 + int(numbers[0])
    ends = (first + np.cumsum(numbers[1:first])).tolist()
    if 1 + len(ends) != first or len(numbers) != [first, *ends][-1]:
        raise InternalError(f"a rank message has {len(numbers)} numbers, which is not what its lengths say")
    arrays = [numbers[begin:end] for begin, end in pairwise([first, *ends])]
    match kind:
        case 0:
            return None
        case 1:
            ids: list[int] = arrays[0].tolist()
            return ids
        case 2:
            (pool, pool_slots), logit_rows = arrays[0].tolist(), arrays[1]
            return Forward(pool, pool_slots, tuple(_segments(arrays[2:])), logit_rows)
    raise InternalError(f"a rank message of kind {kind} came, must be 0 to 2: the ranks do not run the same version")


def _segments(arrays: Sequence[Numbers]) -> Iterator[Segment]:
    for i in range(0, len(arrays), 6):
        (chain, wants_logits), (prefix, slots) = arrays[i].tolist(), arrays[i + 4 : i + 6]
        tokens, parents, positions = (array.astype(np.int64) for array in arrays[i + 1 : i + 4])
        yield Segment(tokens, chain, parents, positions, prefix, slots, bool(wants_logits))
