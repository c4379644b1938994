"""Test that a device whose cores others use keeps its promise: a session is hardly slower than without speculation.

Engine, drafter and controller are the product's own, and time is simulated, so that nothing depends on the machine. A
device that gets a third of a core takes three times as long for a decode, and nobody tells it: what it does about that
follows from what it and its verifier measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from benchmarks.support.simulated_gpu import VOCABULARY, SimulatedGpu, token_at
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.device_sampling import DeviceSampler
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from coordinator import window
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import (
    FIRST_DIRECTIVE,
    Append,
    Attach,
    Commit,
    Directive,
    SessionLimits,
    sampling_message,
)
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost
from outrider.core.tree import ROOT
from outrider.wire.v1 import engine_pb2
from outrider.wire.v1.coordinator_pb2 import WindowDecision

PROMPT = (1, 2, 3)
TOKENS = 200
LIMITS = SessionLimits()
RTT_S = 0.002
STEP_S, TOKEN_S = 0.030, 0.0005
"""Time of a step of one token, and of each further one."""
DECODE_S = 0.004
"""Time of a decode on an idle device."""
REPORT_S = 0.5
"""Time between two decisions, by what device and verifier have measured."""


class Target(SimulatedGpu):
    """Takes the time of its tokens for a step. The engine's own work takes none."""

    def forward(self, batch: PackedBatch, plan: object) -> object:  # type: ignore[override]
        self.step_s = STEP_S + TOKEN_S * (batch.input_ids.shape[-1] - 1)
        return super().forward(batch, plan)

    def _work(self) -> None: ...


class SharedCore:
    """A draft with its clock, which has a share of a core. quality: the share of its first proposals that are right."""

    def __init__(self, quality: float, share: float) -> None:
        self.quality, self.share, self.now = quality, share, 0.0

    def begin(self, task: DraftTask) -> None: ...

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None: ...

    def knows(self, token: int) -> bool:
        return True

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        self.now += DECODE_S / self.share
        return [self._propose(node.position) for node in nodes]

    def _propose(self, position: int) -> list[Proposal]:
        token = token_at(position)
        right = position * 0.618034 % 1.0 < self.quality
        return [
            Proposal(token if right else (token + 1) % VOCABULARY, 0, 1.0),
            Proposal((token + 2) % VOCABULARY, 1, 1.0),
        ]


class Device:
    """A device. sent: its messages, each with the time at which it leaves. inbox: commits and when they come."""

    def __init__(self, core: SharedCore) -> None:
        self.core = core
        idle = DecodeLatency(((1, DECODE_S), (4, 1.2 * DECODE_S)))
        self.drafter = Drafter([CalibratedSource(core, Calibrator(), Calibrator(), idle)], lambda: core.now)
        self.session = DeviceSession(
            Attach(prompt=PROMPT, sampling=sampling_message(SamplingParams()), max_tokens=TOKENS, ignore_eos=True)
        )
        self.sent: list[tuple[float, Append]] = []
        self.inbox: list[tuple[float, Commit]] = []
        self._sequences: dict[int, tuple[int, ...]] = {}
        """The drafter's node -> all generated tokens down to it."""
        self._nodes: dict[tuple[int, ...], int] = {}
        """The same tokens -> the session's node."""
        self.directive = FIRST_DIRECTIVE
        self._advanced, self._resting = 0, False

    @property
    def plan(self) -> SpeculationPlan:
        """Return what its verifier's last directive asks of it."""
        return SpeculationPlan.of(self.directive, LIMITS)

    def follow(self, directive: Directive) -> None:
        self.directive = directive
        self.drafter.replan(self.plan)

    def run(self, until: float) -> None:
        """Draft as the worker's thread does, which reads commits between two decodes; the event loop never waits."""
        while self.core.now < until:
            if self._advanced < len(self.session.received):
                self.drafter.advance(self.session.received[self._advanced :])
                self._advanced = len(self.session.received)
                self._take(self.drafter.harvest(moved=True))
            moved = self.drafter.step()
            if not moved:
                self.core.now = max(self.core.now, min([until, *(at for at, _ in self.inbox[:1])]))
            self._receive()
            self._take(self.drafter.harvest(moved=moved))

    def _receive(self) -> None:
        while self.inbox and self.inbox[0][0] <= self.core.now:
            at, commit = self.inbox.pop(0)
            self.session.on_commit(commit)
            self._send(at)

    def _take(self, update: DraftUpdate | None) -> None:
        if update is None:
            return
        received = tuple(self.session.received)
        self._resting = update.resting and update.base == len(received)
        for node in update.nodes:
            above = self._sequences[node.parent] if node.parent else received[: update.base]
            sequence = self._sequences[node.id] = (*above, node.token)
            parent = ROOT if sequence[:-1] == received else self._nodes.get(sequence[:-1])
            if parent is not None and (parent == ROOT or parent in self.session.tree):
                added = self.session.add(parent, node.token)
                if added is not None:
                    self._nodes[sequence] = added
        self._send(self.core.now)

    def _send(self, now: float) -> None:
        late = not len(self.session.tree) and self.drafter.decode_s + RTT_S > self.plan.draft_wait_s
        resting = not self.plan.speculates or (self.plan.waits and (self._resting or late))
        append = None if self.session.finished else self.session.poll(resting=resting)
        if append is not None:
            self.sent.append((now, append))


def speed_up(share: float, quality: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how many times as fast a session is as without speculation, from its first token on."""
    gpu, device = Target(0.0, overlaps=False), Device(SharedCore(quality, share))
    monkeypatch.setattr("cloud_verifier.engine.step_profiler.perf_counter", lambda: gpu.now)
    config = EngineConfig(kv_slots=2 * TOKENS)
    cost = StepCost({rows: STEP_S + TOKEN_S * (rows - 1) for rows in (1, 17, 65)})
    executor = TorchExecutor(cast("TargetModel", gpu), config, cost)
    executor.device_sampler = cast("DeviceSampler", gpu)
    engine = Engine(executor, config, clock=lambda: gpu.now)
    engine.start("s", device.session.attach(1, LIMITS), LIMITS, FIRST_DIRECTIVE)
    engine.update("s", engine_pb2.SessionUpdate(rtt_ms=1e3 * RTT_S))
    device.drafter.begin(DraftTask(PROMPT, max_tokens=TOKENS), device.plan)
    decided, reported_s = dict[str, WindowDecision](), 0.0
    while not (device.inbox and device.inbox[-1][1].finish):
        due = engine.next_deadline()
        begins = gpu.now + RTT_S if due is None else max(gpu.now, due)
        device.run(begins)
        if device.sent and device.sent[0][0] + RTT_S / 2 <= begins:
            at, append = device.sent.pop(0)
            gpu.now = max(gpu.now, at + RTT_S / 2)
            engine.append("s", append)
            continue
        gpu.now = begins
        for event in engine.step():
            assert isinstance(event, Committed)
            device.inbox.append((gpu.now + RTT_S / 2, event.commit))
        if gpu.now > reported_s + REPORT_S and (told := engine.telemetry.get("s")) is not None:
            reported_s, told.rtt_ms, told.draft_ms = gpu.now, 1e3 * RTT_S, 1e3 * device.drafter.decode_s
            load = engine.stats().verifier
            decided = window.decide(load, [told], decided, {}, LIMITS, {})
            if decided:
                directive = window.directive(decided["s"], LIMITS)
                directive.step_ms = load.step_ms
                engine.update("s", engine_pb2.SessionUpdate(directive=directive))
                device.follow(directive)
    return TOKENS * STEP_S / gpu.now


def test_a_device_with_a_core_to_itself_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed_up(share=1.0, quality=0.8, monkeypatch=monkeypatch) > 1.5


@pytest.mark.parametrize("quality", [0.0, 0.8])
@pytest.mark.parametrize("share", [1 / 3, 1 / 10, 1 / 100])
def test_a_device_whose_core_others_use_is_hardly_slower_than_without_speculation(
    share: float, quality: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speed_up(share, quality, monkeypatch) > 0.97
