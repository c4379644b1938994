"""Run the model's forward pass as CUDA graphs, so that a step of few rows costs its kernels, not their launches.

A graph is captured for a width of rows and one of logits (`step_tables.WIDTHS`) when a step first needs it, which takes
the time of a few forward passes, and is replayed for every step that fits. Inputs are copied to static buffers before a
replay. Rows beyond the step's have no slot and no keys: they are written nowhere, see nothing and are discarded. All
graphs share one memory pool, since only one of them runs at a time and none reads what another left, and one buffer for
each output, from which a replay's are copied.

A forward pass that reads values back to the host, as a loop over the experts that tokens were routed to, cannot be
captured. It is detected by watching the first one; such a model runs without graphs, as do steps that fit no width. Any
other failure turns graphs off, and the model runs without them.

On an H100, up to 128 rows of a Qwen3 of 8B take 9 to 11 ms as a graph, and 50 to 60 without one, in which the host
launches 1,000 kernels one by one. Tests without a GPU run with a recorder that calls the forward pass again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.kernels.step_tables import TILE, WIDTHS, width_of
from cloud_verifier.engine.torch_backend.kernels.triton_attention import TritonPlan
from cloud_verifier.engine.torch_backend.kv_pool import LayerShape

log = logging.getLogger(__name__)

TABLE_INTS = 1 << 22
"""Size of the buffer for a step's index table: 16 MB, enough for 128 sessions of 32,000 tokens."""
PARTIAL_BYTES = 768 << 20
"""Size of the buffer for partial results, which all graphs share: enough for 64 sessions of 32,000 tokens with 32 heads
of 128."""
TOLERANCE = 0.02
"""Greatest difference of a new graph's logits to those of the same forward pass outside of it, as a share of the
greatest logit. The kernels are the same, so there should be none."""
WARM_UPS = 2

Outputs = tuple[torch.Tensor, ...]
"""Logits `[R, V]`, and whatever else a forward pass gives, `[R, n]` each."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan], Outputs]
"""(ids `[1, T]`, positions `[1, T]`, rows `[R]`, plan) -> outputs."""


class CudaGraphRecorder:
    """Captures CUDA graphs of functions, on a stream of its own and into one memory pool.

    programs: number of kernel programs that keep the device busy.
    """

    def __init__(self, device: torch.device) -> None:
        self.programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Outputs]) -> Outputs:
        """Return the result of `work`, computed on the capture's stream: libraries create handles and workspaces per
        stream, which no capture may do."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        return result

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Capture `work` and return a function that repeats it on the same tensors."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: CUDA calls of other threads, such as freeing pinned memory, then break no capture.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                work()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own stream current
        return graph.replay


class _Static:
    """Holds the graphs over one pool, and the buffers at fixed addresses that they use; W is the greatest width."""

    def __init__(
        self, plan: TritonPlan, items: int, recorder: CudaGraphRecorder, kv_heads: int, widths: Sequence[int]
    ) -> None:
        device, widest = plan.tables.device, widths[-1]
        self.recorder = recorder
        self.pool = plan.pool
        self.ids = torch.zeros(1, widest, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, widest, dtype=torch.int64, device=device)
        self.rows = torch.zeros(widest, dtype=torch.int64, device=device)
        self.tables = torch.zeros(TABLE_INTS, dtype=torch.int32, device=device)
        self.plans = plan.static(self.tables, widths, items, max(1, recorder.programs // kv_heads))
        """By the width of rows."""
        self.outputs: Outputs = ()
        """`[W, n]` each, created when the first forward pass has shown their shapes."""
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        """By the width of rows and the width of logits."""


class GraphedForward:
    """Runs a forward pass as a graph if possible; otherwise it returns None, and the caller runs it without."""

    def __init__(
        self,
        forward: Forward,
        new_recorder: Callable[[], CudaGraphRecorder],
        heads: int,
        layers: Sequence[LayerShape],
        most_rows: int = WIDTHS[-1],
    ) -> None:
        """Capture nothing yet. heads: query heads of a layer. layers: shapes of their keys and values.

        most_rows: of a step, for which there are buffers; those for the logits take most.
        """
        self._forward = forward
        self._new_recorder = new_recorder
        self._kv_heads = max(layer.kv_heads for layer in layers)
        dim = max(layer.value_dim for layer in layers)
        self._items = max(1, PARTIAL_BYTES // (4 * TILE * heads * (dim + 2)))
        self._static: _Static | None = None
        self._widths = [width for width in WIDTHS if width <= width_of(min(most_rows, WIDTHS[-1]))]
        self.off = ""
        """The reason why this model runs without graphs; empty if it runs with them."""

    @property
    def recorded(self) -> int:
        """Return the number of graphs captured for the current pool."""
        return len(self._static.replays) if self._static else 0

    def __call__(self, batch: PackedBatch, plan: AttentionPlan) -> Outputs | None:
        """Return a copy of the step's outputs; None if no graph can serve the step."""
        if self.off or not isinstance(plan, TritonPlan) or not self._fits(plan):
            return None
        try:
            with torch.cuda.device_of(plan.tables):
                return self._run(batch, plan)
        except Exception as error:
            self._turn_off(f"{type(error).__name__}: {error}")
            return None

    def _fits(self, plan: TritonPlan) -> bool:
        return plan.width <= self._widths[-1] and plan.tables.numel() <= TABLE_INTS and plan.items <= self._items

    def _run(self, batch: PackedBatch, plan: TritonPlan) -> Outputs | None:
        static = self._static
        if static is None or static.pool is not plan.pool:
            self._static = None  # frees the old graphs before new ones are captured
            static = self._static = _Static(plan, self._items, self._new_recorder(), self._kv_heads, self._widths)
        wanted = len(batch.logit_rows)
        key = (plan.width, width_of(max(1, wanted)))
        _fill(static, batch, plan, key)
        if key not in static.replays and not self._record(static, key):
            return None
        static.replays[key]()
        return tuple(buffer[:wanted].clone() for buffer in static.outputs)

    def _record(self, static: _Static, key: tuple[int, int]) -> bool:
        """Capture the graph for this (width of rows, width of logits); returns False if that turned graphs off.

        The forward pass runs here too, which does no harm: it is idempotent.
        """
        begun = perf_counter()
        width, kept = key

        def forward() -> Outputs:
            return self._forward(
                static.ids[:, :width], static.positions[:, :width], static.rows[:kept], static.plans[width]
            )

        with ReadsBack() as watch:
            expected = static.recorder.warm_up(forward)
        if watch.found:
            self._turn_off(f"its forward makes the host wait for the device: {', '.join(sorted(watch.found))}")
            return False
        for _ in range(WARM_UPS - 1):
            expected = static.recorder.warm_up(forward)
        if not static.outputs:
            static.outputs = tuple(one.new_zeros(self._widths[-1], one.shape[1]) for one in expected)
        buffers = [buffer[:kept] for buffer in static.outputs]

        def work() -> None:
            for buffer, output in zip(buffers, forward(), strict=True):
                buffer.copy_(output)

        replay = static.recorder.record(work)
        replay()
        logits = expected[0]
        difference = float((buffers[0] - logits).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(logits.abs().max())):
            self._turn_off(f"its graph's logits differ by {difference:.2e} from those of the forward that it repeats")
            return False
        static.replays[key] = replay
        log.info("CUDA graph for %d rows and %d logits made in %.1f s", width, kept, perf_counter() - begun)
        return True

    def _turn_off(self, reason: str) -> None:
        self.off = reason
        self._static = None
        log.warning("the model runs without CUDA graphs: %s", reason)


def _fill(static: _Static, batch: PackedBatch, plan: TritonPlan, key: tuple[int, int]) -> None:
    """Copy the step's inputs to the static buffers, and fill the buffers with 0 up to the widths."""
    width, kept = key
    inputs = (batch.input_ids[0], batch.position_ids[0], batch.logit_rows)
    for buffer, values, size in zip(
        (static.ids[0], static.positions[0], static.rows), inputs, (width, width, kept), strict=True
    ):
        count = len(values)
        buffer[:count].copy_(values, non_blocking=True)
        buffer[count:size].zero_()
    static.tables[: plan.tables.numel()].copy_(plan.tables, non_blocking=True)


_aten = torch.ops.aten
_READING = {
    _aten._local_scalar_dense,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.repeat_interleave,
    _aten.equal,
}
"""Operations after which the host has to know the result, or the result's shape."""
_COPYING = {_aten._to_copy, _aten.copy_}
_MASKS = (torch.bool, torch.uint8)
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index}


class ReadsBack(TorchDispatchMode):
    """Records operations that make the host wait for the device or move data: none can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode a composite operation is not decomposed, and would hide its parts
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        devices = {value.device for value in (*args, result) if isinstance(value, torch.Tensor)}
        moved = packet in _COPYING and len(devices) > 1
        masked = packet in _INDEXING and any(getattr(index, "dtype", None) in _MASKS for index in args[1])
        if packet in _READING or moved or masked:
            self.found.add(str(packet))
        return result
