"""Connect an engine to devices that draft with mistakes, without a network between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from session_messages import attach, directive

from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Failed
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, SessionLimits
from outrider.core.sampling import SamplingParams
from outrider.wire.v1 import engine_pb2 as pb

LIMITS = SessionLimits(nodes=24, depth=8, in_flight=48, run_ahead=32)
DIRECTIVE = directive(window_nodes=24, window_depth=8, nodes_per_step=8, draft_wait_ms=0)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=5),
    "top-k": SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=2**63),
    "penalised": SamplingParams(
        temperature=0.7,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.1,
        logit_bias=((5, 3.0), (9, -100.0)),
        seed=9,
    ),
}


@dataclass
class Served:
    """Connects an engine and its devices, without a network between them."""

    engine: Engine
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    devices: dict[str, DeviceSession] = field(default_factory=dict)
    truth: dict[str, list[int]] = field(default_factory=dict)
    commits: dict[str, list[Commit]] = field(default_factory=dict)
    failures: dict[str, Failed] = field(default_factory=dict)
    recorded: list[pb.EngineEvent] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    """Devices that send nothing, and so confirm nothing."""

    def attach(
        self, name: str, device: DeviceSession, truth: Sequence[int] = (), salt: str = "", record: bool = False
    ) -> None:
        """Attach a device. truth: tokens from which it drafts, with mistakes; none if it drafts nothing."""
        attach = device.attach(device.epoch + 1, LIMITS)
        self.engine.start(name, attach, LIMITS, DIRECTIVE, salt, record=record)
        self.devices[name], self.truth[name] = device, list(truth)
        self.commits.setdefault(name, [])

    def turn(self) -> None:
        """Have the devices draft and send, make a step, and deliver what it brings."""
        for name, device in self.devices.items():
            if not device.finished and name not in self.failures and name not in self.asleep:
                self._draft(device, self.truth[name])
                while (append := device.poll(resting=True)) is not None:
                    self.engine.append(name, append)
        for event in self.engine.step():
            match event:
                case Committed(name, commit):
                    self.commits[name].append(commit)
                    self.devices[name].on_commit(commit)
                case Failed(name):
                    self.failures[name] = event
        self.recorded += self.engine.take_recorded()

    def run(self, turns: int = 1_000) -> None:
        for _ in range(turns):
            if all(device.finished or name in self.failures for name, device in self.devices.items()):
                return
            self.turn()
        raise AssertionError("some sessions never end")

    def _draft(self, device: DeviceSession, truth: Sequence[int]) -> None:
        parent = 0
        for token in truth[len(device.received) :][: self.rng.randrange(7)] if not len(device.tree) else ():
            if self.rng.random() < 0.3:
                device.add(parent, self.rng.randrange(60))  # a wrong sibling
            node = device.add(parent, token if self.rng.random() < 0.8 else self.rng.randrange(60))
            if node is None:
                return
            parent = node


def preemptions(served: Served) -> int | None:
    """Return how often sessions of this engine's target have lost their keys and values; None if it takes none away."""
    executor = served.engine._executor
    return getattr(executor, "preemptions", None)


def device_of(
    prompt: Sequence[int], sampling: str = "greedy", max_tokens: int = 24, **options: object
) -> DeviceSession:
    return DeviceSession(attach(0, prompt, sampling=SAMPLINGS[sampling], max_tokens=max_tokens, **options))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1_000 * seed + length).choices(range(60), k=length)
