"""Compute attention in triton kernels, for CUDA: the backend `triton`. Nothing is gathered or padded per session.

One kernel writes the rows' keys and values to their slots. One computes, for every tile of rows and every span of its
keys, a partial result: keys are read from their slots, once for all query heads that share them, and the mask of a tree
is in bit words. One adds a row's partial results in order of position. All index data of a step are one copy to the
device.

Spans and blocks of keys begin at fixed positions, and a row's products have the same shape in every batch. So the
attention of a row does not depend on other sessions, nor, for prompts and for trees without a branch, on how tokens
were divided into steps. Logits still may: cuBLAS chooses its kernels, and with them a row's bits, by the number of
rows.

The kernels were run on an H100 and in triton's interpreter, against `sdpa`, and compiled for sm_80 and sm_90. Triton
builds its launchers with a C compiler when a kernel is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kernels import step_tables
from cloud_verifier.engine.torch_backend.kernels.attention import Scoring
from cloud_verifier.engine.torch_backend.kernels.step_tables import Table
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from outrider.core.errors import ModelRefused

STAGING = 2
"""Pinned buffers, used in turn: one is filled while the other may still be copied."""
INSTALL = "torch's CUDA builds bring it; elsewhere: pip install triton"


def choose(attention: str, device: torch.device) -> str:
    """Return the backend's name: what `auto` means on this device, and any other name as it is."""
    if attention != "auto":
        return attention
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "sdpa"


class TritonBackend:
    """Serves pools on CUDA, and on a CPU in triton's interpreter (TRITON_INTERPRET=1), for tests."""

    name = "triton"

    def __init__(self) -> None:
        """Check that triton can run. Raises ModelRefused if triton is missing, or has no device to run on."""
        try:
            from cloud_verifier.engine.torch_backend.kernels import triton_kernels
        except ImportError as error:
            raise ModelRefused(f"attention triton needs triton: {error}; {INSTALL}") from error
        if not (torch.cuda.is_available() or triton_kernels.INTERPRETED):
            raise ModelRefused("attention triton needs a CUDA device, and there is none; use sdpa")
        self._launch: Any = triton_kernels
        self._staging = _Staging()

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> TritonPlan:
        device = pool.keys[0].device
        if device.type != "cuda" and not self._launch.INTERPRETED:
            raise ModelRefused(f"attention triton needs a model on a CUDA device, got {device}; use sdpa")
        rows = sum(segment.rows for segment in segments)
        width = step_tables.width_of(rows)
        if device.type == "cuda":
            tables, items = self._staging.build(segments, width, device)
        else:
            table, items = step_tables.build(segments, width, lambda size: np.empty(size, dtype=np.int32))
            tables = torch.from_numpy(table)
        return TritonPlan(self._launch, pool, tables, width, items)


class TritonPlan:
    """One step's index tables and buffers, which serve every layer.

    tables: int32, as `step_tables` builds them, on the pool's device. items: number of items that the buffers for
    partial results can hold. programs: size of the grid over items; None for one per item. A plan for a CUDA graph has
    tables at a fixed address that are filled before every replay, buffers for many items, and fewer programs.
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
        """By (query heads, dimension of the values)."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        shape = (query.shape[1], value.shape[3])
        if shape not in self._partials:
            self._partials[shape] = self._launch.empty_partials(self.items, *shape, query.device)
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
        """Return plans over the same pool for graphs, by width; they share their buffers for partial results."""
        plans = {width: TritonPlan(self._launch, self.pool, tables, width, items, programs) for width in widths}
        shared: dict[tuple[int, int], Any] = {}
        for plan in plans.values():
            plan._partials = shared
        return plans


class _Staging:
    """Copies tables from pinned host memory, which grows as needed and is used again when its last copy is over."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.int32)] * STAGING
        self._done: list[torch.cuda.Event | None] = [None] * STAGING
        self._turn = 0

    def build(self, segments: Sequence[Segment], width: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the step's table on the device, and its number of items."""
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
