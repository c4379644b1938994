"""Launches of the kernels of `triton` attention: what their grids, blocks and rooms are for a model's heads.

Imports triton through the kernels, so it is imported only by who wants them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cloud_verifier.engine.kernels import step_tables, triton_kernels
from cloud_verifier.engine.kernels.attention import Scoring

MAX_GROUP = 8
"""Query heads of a key head in one program."""
QUERY_BYTES = 32 * 1024
"""Of one program's queries; fewer heads are in it where they would take more."""
PRECISION = "tf32x3"
"""Of products of float32: three of TF32, on tensor cores, with about float32's error. One alone keeps ten bits."""


@dataclass(frozen=True)
class Partials:
    """Where items leave their results; P is at least items * TILE."""

    outs: torch.Tensor
    """float32 `[P, Hq, Dv]`: weighted values."""
    maxima: torch.Tensor
    """float32 `[P, Hq]`: the greatest score, times log2(e); -inf where nothing was seen."""
    sums: torch.Tensor
    """float32 `[P, Hq]`: the sum of weights relative to it."""

    @classmethod
    def empty(cls, items: int, heads: int, dim: int, device: torch.device) -> Partials:
        parts = items * step_tables.TILE

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(floats(parts, heads, dim), floats(parts, heads), floats(parts, heads))


def write(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, width: int
) -> None:
    """key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]` to the slots of the T rows."""
    key, value = _dense(key), _dense(value)
    _, heads, rows, dk = key.shape
    dv = value.shape[3]
    strides = (key.stride(1), key.stride(2), value.stride(1), value.stride(2))
    triton_kernels.write[(rows, heads)](
        key, value, keys, values, tables, width, *strides, dk, dv, _padded(dk), _padded(dv), num_warps=1
    )


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    width: int,
    programs: int,
    partials: Partials,
    scoring: Scoring,
) -> torch.Tensor:
    """query `[1, Hq, T, Dk]` -> `[1, T, Hq, Dv]`; programs: of the grid, over items."""
    query = _dense(query)
    _, heads, rows, dk = query.shape
    kv_heads, dv = values.shape[1:]
    groups = heads // kv_heads
    shape = Shape.of(groups, dk, dv, query.dtype)
    triton_kernels.attend[(programs, kv_heads * shape.blocks_of_heads)](
        query,
        keys,
        values,
        tables,
        partials.outs,
        partials.maxima,
        partials.sums,
        width,
        float(scoring.scale),
        float(scoring.softcap or 1.0),
        int(scoring.window or 0),
        query.stride(1),
        query.stride(2),
        *shape.constants,
        scoring.softcap is not None,
        scoring.window is not None,
        PRECISION,
        triton_kernels.INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    result = query.new_empty((1, rows, heads, dv))
    sinks = partials.sums if scoring.sinks is None else scoring.sinks
    triton_kernels.merge[(rows, kv_heads)](
        partials.outs,
        partials.maxima,
        partials.sums,
        sinks,
        tables,
        result,
        width,
        groups,
        _power_of_two(groups),
        dv,
        _padded(dv),
        scoring.sinks is not None,
        num_warps=4,
    )
    return result


@dataclass(frozen=True)
class Shape:
    """How `triton_kernels.attend` is cut for a model's heads."""

    groups: int
    group: int
    """Query heads in one program, a power of two."""
    block: int
    """Keys at once."""
    dk: int
    dv: int
    warps: int
    stages: int

    @classmethod
    def of(cls, groups: int, dk: int, dv: int, dtype: torch.dtype) -> Shape:
        """So that queries, and one or two blocks of keys and values, fit the 99 KB of shared memory of sm_86 and 89."""
        room = max(1, QUERY_BYTES // (step_tables.TILE * _padded(dk) * dtype.itemsize))
        group = min(MAX_GROUP, room, _power_of_two(groups))
        size = (_padded(dk) + _padded(dv)) * dtype.itemsize
        small = dtype.itemsize == 2 and size <= 1024
        wide = step_tables.TILE * group * max(64, _padded(dv)) > 64 * 128 or group > 4
        return cls(
            groups=groups,
            group=group,
            block=64 if size <= 512 else 32 if size <= 1024 else 16,
            dk=dk,
            dv=dv,
            warps=8 if wide else 4,
            stages=2 if small else 1,
        )

    @property
    def blocks_of_heads(self) -> int:
        return -(-self.groups // self.group)

    @property
    def constants(self) -> tuple[int, ...]:
        """In the order of the kernel's parameters."""
        heads = (self.groups, self.group, self.blocks_of_heads, self.block)
        return (*heads, self.dk, self.dv, _padded(self.dk), _padded(self.dv))


def _padded(dim: int) -> int:
    """A product's sides are powers of two and at least 16."""
    return max(16, _power_of_two(dim))


def _power_of_two(n: int) -> int:
    """The least that is not smaller."""
    return 1 << (n - 1).bit_length()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """With the last dimension's elements side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
