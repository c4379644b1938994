"""Launch the kernels of `triton` attention with the grids, blocks and buffers that suit a model's heads.

Imports triton through the kernels, so it is imported only where `triton` is chosen.
"""

from __future__ import annotations

import torch

from cloud_verifier.engine.kernels import step_tables, triton_kernels
from cloud_verifier.engine.kernels.attention import Scoring

MAX_GROUP = 8
"""The most query heads of a key head in one program."""
QUERY_BYTES = 32 * 1024
"""The most bytes of one program's queries; it has fewer heads if they would take more."""
PRECISION = "tf32x3"
"""The way to multiply float32: by three products of TF32 on tensor cores, with about float32's error."""

Partials = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Partial results of P >= items * TILE rows, float32: weighted values `[P, Hq, Dv]`, greatest scores times log2(e)
`[P, Hq]` (-inf if no key was seen), and sums of weights relative to these `[P, Hq]`."""


def empty_partials(items: int, heads: int, dim: int, device: torch.device) -> Partials:
    """Return buffers for the partial results of so many items; dim: of the values."""
    parts = items * step_tables.TILE
    shapes = (parts, heads, dim), (parts, heads), (parts, heads)
    outs, maxima, sums = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    return outs, maxima, sums


def write(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, width: int
) -> None:
    """Write key `[1, Hkv, T, Dk]` and value `[1, Hkv, T, Dv]` to the slots of the T rows."""
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
    """Return the attention `[1, T, Hq, Dv]` of query `[1, Hq, T, Dk]`; programs: size of the grid over items."""
    query = _dense(query)
    _, heads, rows, dk = query.shape
    kv_heads, dv = values.shape[1:]
    groups = heads // kv_heads
    constants, warps, stages = launch_constants(groups, dk, dv, query.dtype)
    numbers = float(scoring.scale), float(scoring.softcap or 1.0), int(scoring.window or 0)
    strides = query.stride(1), query.stride(2)
    variant = scoring.softcap is not None, scoring.window is not None, PRECISION, triton_kernels.INTERPRETED
    arguments = (query, keys, values, tables, *partials, width, *numbers, *strides, *constants.values(), *variant)
    grid = (programs, kv_heads * constants["BLOCKS_OF_HEADS"])
    triton_kernels.attend[grid](*arguments, num_warps=warps, num_stages=stages)
    result = query.new_empty((1, rows, heads, dv))
    sinks = partials[2] if scoring.sinks is None else scoring.sinks  # without sinks the kernel reads none
    dims = groups, _power_of_two(groups), dv, _padded(dv), scoring.sinks is not None
    triton_kernels.merge[(rows, kv_heads)](*partials, sinks, tables, result, width, *dims, num_warps=4)
    return result


def launch_constants(groups: int, dk: int, dv: int, dtype: torch.dtype) -> tuple[dict[str, int], int, int]:
    """Return (constants, warps, stages) of `triton_kernels.attend` for a model with `groups` query heads per key head.

    They let queries and one or two blocks of keys and values fit the 99 KB of shared memory of sm_86 and sm_89. The
    constants are in the order of the kernel's parameters; GROUP, the query heads in one program, is a power of two.
    """
    dk_pad, dv_pad = _padded(dk), _padded(dv)
    room = max(1, QUERY_BYTES // (step_tables.TILE * dk_pad * dtype.itemsize))
    group = min(MAX_GROUP, room, _power_of_two(groups))
    size = (dk_pad + dv_pad) * dtype.itemsize
    wide = step_tables.TILE * group * max(64, dv_pad) > 64 * 128 or group > 4
    heads = {"GROUPS": groups, "GROUP": group, "BLOCKS_OF_HEADS": -(-groups // group)}
    block = {"BLOCK": 64 if size <= 512 else 32 if size <= 1024 else 16}
    dims = {"DK": dk, "DV": dv, "DK_PAD": dk_pad, "DV_PAD": dv_pad}
    return heads | block | dims, 8 if wide else 4, 2 if dtype.itemsize == 2 and size <= 1024 else 1


def _padded(dim: int) -> int:
    """Return the least side of a product for so many elements: a power of two, at least 16."""
    return max(16, _power_of_two(dim))


def _power_of_two(n: int) -> int:
    """Return the least power of two that is not smaller than n."""
    return 1 << (n - 1).bit_length()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with adjacent elements in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
