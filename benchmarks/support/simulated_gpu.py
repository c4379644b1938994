"""Run the engine over a simulated GPU, and measure for how much of the time it idles.

The GPU takes the same time for every step, and chooses the token of each row as the verifier's kernels would. Its clock
is the engine's CPU time: it goes on while the engine works, jumps ahead where the engine waits, and stands still while
the scripted devices draft, which elsewhere are other machines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.support.stepped_engine import LIMITS, ScriptedDevice
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.device_sampling import DeviceSampler, Wanted
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.kernels import step_tables
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import InternalError
from outrider.core.protocol.messages import Directive
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost

VOCABULARY = 50_000
PROMPT = 128

_Position = TypeVar("_Position", int, NDArray[np.int64])


def token_at(position: _Position) -> _Position:
    """Return the token that the simulated target generates at a position, or at each of an array of positions."""
    return (7_919 * position + 13) % VOCABULARY


class SimulatedGpu:
    """Stands in for a TargetModel, each forward pass of which takes `step_s`. idle_s: for how long none was under way,
    since the first one. host_s: CPU time of the engine."""

    label = name = hardware = "simulated GPU"
    deviation = 0.0
    eos_token_ids = ()
    max_sequence = 4_096
    vocab_size = VOCABULARY
    layers = (LayerShape(1, 1, 1),)
    torch_dtype = torch.float32
    device = torch.device("cpu")
    states = None

    def __init__(self, step_s: float, *, overlaps: bool) -> None:
        self.step_s = step_s
        self.overlaps = overlaps
        self.idle_s = self.host_s = 0.0
        self.now = 0.0
        """Seconds that the engine has worked or waited."""
        self.free: float | None = None
        """When the last forward pass ends."""
        self._mark = 0.0
        self.attention = SimpleNamespace(plan=self._plan)

    @contextmanager
    def engine_works(self) -> Iterator[None]:
        self._mark = time.thread_time()
        yield
        self._work()

    def _work(self) -> None:
        """Let the time go on by what the engine has worked. The thread's own clock is slow to read."""
        before, self._mark = self._mark, time.thread_time()
        self.host_s += self._mark - before
        self.now += self._mark - before

    def bound_rows(self, most: int) -> None:
        """Do nothing: there are no graphs."""

    def forward(self, batch: PackedBatch, plan: object) -> torch.Tensor:
        """Begin a forward pass, after the one before."""
        self._work()
        free = self.now if self.free is None else self.free
        self.idle_s += max(0.0, self.now - free)
        self.free = max(self.now, free) + self.step_s
        return torch.empty(len(batch.logit_rows), 1)

    def timer(self) -> SimulatedTimer:
        return SimulatedTimer(self)

    def wait(self, until: float) -> None:
        self._work()
        self.now = max(self.now, until)

    def choose(self, logits: torch.Tensor, wanted: Wanted) -> NDArray[np.int64]:
        """Return each row's token, as DeviceSampler does."""
        return token_at(wanted.positions)

    def _plan(self, segments: Sequence[Segment], pool: KVPool) -> object:
        rows = sum(segment.rows for segment in segments)
        return step_tables.build(segments, step_tables.width_of(rows), lambda size: np.empty(size, dtype=np.int32))


class SimulatedTimer:
    """Stands in for a Timer."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._ends = 0.0

    def stop(self) -> None:
        self._ends = self._gpu.free or 0.0

    def seconds(self) -> float:
        self._gpu.wait(self._ends)
        return self._gpu.step_s


def idle_share(sessions: int, *, nodes: int, step_s: float, cohorts: bool, tokens: int) -> dict[str, float]:
    """Serve so many sessions until each has its tokens; return shares and times of the steps after the prompts.

    cohorts: whether the engine may step in two cohorts. Devices are near, and offer `nodes` draft tokens each time.
    Raises InternalError if a session fails or receives other tokens than the target's.
    """
    gpu = SimulatedGpu(step_s, overlaps=cohorts)
    slots = sessions * (PROMPT + tokens + LIMITS.nodes)
    config = EngineConfig(kv_slots=slots, token_budget=2_048, max_sessions=sessions, first_token_s=1e6)
    cost = StepCost({1: step_s, config.token_budget: step_s})
    executor = TorchExecutor(cast("TargetModel", gpu), config, cost)
    executor.device_sampler = cast("DeviceSampler", gpu)
    engine = Engine(executor, config, clock=lambda: gpu.now)
    engine.allocation = lambda each, rows, cost: (tuple(map(len, each)), ())
    truth = [token_at(position) for position in range(tokens)]
    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    live = {
        str(n): ScriptedDevice([n, *range(1, PROMPT)], tokens, sampling, truth=truth, nodes=nodes)
        for n in range(sessions)
    }
    directive = Directive(
        window_nodes=LIMITS.nodes, window_depth=LIMITS.depth, nodes_per_step=max(1, nodes), min_acceptance=0.05
    )
    for name, device in live.items():
        engine.start(name, device.session.attach(1, LIMITS), LIMITS, directive)
    begun: tuple[float, float, float, int] | None = None
    commits = 0
    while not any(device.session.finished for device in live.values()):
        if begun is None and all(device.session.received for device in live.values()):
            begun = gpu.now, gpu.idle_s, gpu.host_s, commits
        appends = {name: sent for name, one in live.items() if (sent := one.next_append(VOCABULARY)) is not None}
        with gpu.engine_works():
            for name, append in appends.items():
                engine.append(name, append)
            events = engine.step()
        for event in events:
            if not isinstance(event, Committed):
                raise InternalError(f"a session failed: {event}")
            live[event.session_id].session.on_commit(event.commit)
            commits += 1
    if begun is None or any(one.session.received != truth[: len(one.session.received)] for one in live.values()):
        raise InternalError("a session received other tokens than the target's")
    seconds, idle_s, host_s = gpu.now - begun[0], gpu.idle_s - begun[1], gpu.host_s - begun[2]
    stepped = commits - begun[3]
    return {
        "idle_share": idle_s / seconds,
        "host_ms_per_session_step": 1e3 * host_s / stepped,
        "steps_per_s": stepped / sessions / seconds,
    }
