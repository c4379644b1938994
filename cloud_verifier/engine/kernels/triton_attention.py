"""Attention in triton kernels, for CUDA: the backend `triton`. Nothing is gathered or padded per session.

One kernel writes the rows' keys and values to their slots. One computes, for every tile of rows and every span of its
keys, a partial result: keys are read where they lie, once for all query heads that share them, and trees see through
bit words. One adds a row's partial results in order of position. All index data of a step are one copy to the device.

Spans and blocks of keys begin at fixed positions, and a row's products have the same shape in every batch. So what
attention gives a row does not depend on other sessions, nor, for prompts and for trees without a branch, on how tokens
were cut into steps. It is no promise about logits: cuBLAS chooses its kernels by the number of rows, and a row's bits
with them. For that there is `exact`.

The kernels were run in triton's interpreter, against `sdpa`, and compiled for sm_80 and sm_90. They have never run on a
GPU, and nothing here is tuned. Triton builds its launchers with a C compiler when a kernel is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from cloud_verifier.engine.batch import Segment
from cloud_verifier.engine.kernels import step_tables
from cloud_verifier.engine.kernels.attention import Scoring
from cloud_verifier.engine.kernels.step_tables import Table
from cloud_verifier.engine.kv_pool import KVPool
from outrider.core.errors import ModelRefused

STAGING = 2
"""Pinned buffers in turn: one is filled while the other's copy may still be under way."""
INSTALL = "torch's CUDA builds bring it; elsewhere: pip install triton"


def choose(attention: str, device: torch.device) -> str:
    """What `auto` stands for on this device; another name stands for itself."""
    if attention != "auto":
        return attention
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "sdpa"


class TritonBackend:
    """For pools on CUDA, and in triton's interpreter (TRITON_INTERPRET=1) for tests on a CPU."""

    name = "triton"
    row_tile = 1

    def __init__(self) -> None:
        """Raises ModelRefused where triton is missing, or has nothing to run on."""
        try:
            from cloud_verifier.engine.kernels import triton_kernels, triton_launch
        except ImportError as error:
            raise ModelRefused(f"attention triton needs triton: {error}; {INSTALL}") from error
        if not (torch.cuda.is_available() or triton_kernels.INTERPRETED):
            raise ModelRefused("attention triton needs a CUDA device, and there is none; use sdpa or exact")
        self._launch: Any = triton_launch
        self._interpreted: bool = triton_kernels.INTERPRETED
        self._staging = _Staging()

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> TritonPlan:
        device = pool.keys[0].device
        if device.type != "cuda" and not self._interpreted:
            raise ModelRefused(f"attention triton needs a model on a CUDA device, got {device}; use sdpa or exact")
        rows = sum(segment.rows for segment in segments)
        width = step_tables.width_of(rows)
        if device.type == "cuda":
            tables, items = self._staging.build(segments, width, device)
        else:
            table, items = step_tables.build(segments, width, _array)
            tables = torch.from_numpy(table)
        return TritonPlan(self._launch, pool, tables, width, items)


class TritonPlan:
    """What a step's layers share.

    tables: int32, as `step_tables` lays them out, on the pool's device. items: how many partial results there is room
    for. programs: of the grid over them; one per item where None. A plan for a CUDA graph has tables of fixed address
    that are filled before every replay, room for many items, and fewer programs.
    """

    def __init__(
        self, launch: Any, pool: KVPool, tables: torch.Tensor, width: int, items: int, programs: int | None = None
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.width = width
        self.items = items
        self._launch = launch
        self._programs = programs
        self._partials: dict[tuple[int, int], Any] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        shape = (query.shape[1], value.shape[3])
        if shape not in self._partials:
            self._partials[shape] = self._launch.Partials.empty(self.items, *shape, query.device)
        with torch.cuda.device_of(query):  # triton launches on the current device
            self._launch.write(key, value, keys, values, self.tables, self.width)
            result: torch.Tensor = self._launch.attend(
                query,
                keys,
                values,
                self.tables,
                self.width,
                self._programs or self.items,
                self._partials[shape],
                scoring,
            )
        return result

    def static(self, tables: torch.Tensor, widths: Iterable[int], items: int, programs: int) -> dict[int, TritonPlan]:
        """Plans over the same pool for graphs, one per width; they share their room for partial results."""
        plans = {width: TritonPlan(self._launch, self.pool, tables, width, items, programs) for width in widths}
        shared: dict[tuple[int, int], Any] = {}
        for plan in plans.values():
            plan._partials = shared
        return plans

    @staticmethod
    def items_within(size: int, heads: int, dim: int) -> int:
        """Items whose partial results take `size` bytes."""
        return max(1, size // (4 * step_tables.TILE * heads * (dim + 2)))


class _Staging:
    """Pinned host memory that grows and is used again once its last copy is over."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.int32)] * STAGING
        self._done: list[torch.cuda.Event | None] = [None] * STAGING
        self._turn = 0

    def build(self, segments: Sequence[Segment], width: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """The step's table on the device, and its number of items."""
        turn = self._turn = (self._turn + 1) % STAGING
        done = self._done[turn]
        if done is not None:
            done.synchronize()

        def take(size: int) -> Table:
            if self._buffers[turn].numel() < size:
                self._buffers[turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
            array: Table = self._buffers[turn].numpy()[:size]
            return array

        table, items = step_tables.build(segments, width, take)
        tables = self._buffers[turn][: len(table)].to(device, non_blocking=True)
        event = torch.cuda.Event()
        with torch.cuda.device(device):
            event.record()
        self._done[turn] = event
        return tables, items


def _array(size: int) -> Table:
    return np.empty(size, dtype=np.int32)
