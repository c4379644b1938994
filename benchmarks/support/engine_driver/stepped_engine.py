"""Drive an engine step by step, with scripted devices and a draft beside the target, and time each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from benchmarks.support.engine_driver.configurations import PLAIN, SERVER, Configuration, TimedRound, TimedStep
from benchmarks.support.engine_driver.packed_draft import DraftRequest, PackedDraft
from benchmarks.support.engine_driver.scripted_trees import TreeDevice, TreeTally, spine_length
from benchmarks.support.even_allocation import evenly
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Event
from cloud_verifier.engine.row_allocation import by_acceptance
from cloud_verifier.engine.step_profiler import describe
from cloud_verifier.engine.torch_backend.executor import TorchExecutor, profile
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Append, Directive, SessionLimits
from outrider.core.sampling import SamplingParams

RATE = 0.8
"""Share of draft tokens accepted at each depth, once those above it are. The two shipped drafts were recorded at 0.893
and 0.727 on the target's greedy text (models/README.md, "Acceptance")."""
BATCHES = (1, 4, 16, 32, 64, 128)
NODES = (1, 2, 4, 8, 16)
"""Chains of 1, 2, 3, 6 and 11, with siblings beside their upper part from 4 on."""
LIMITS = SessionLimits()
GREEDY = SamplingParams()
WARM = 3
"""Steps with all sessions in them that are not timed."""
STRAGGLING = 32
"""Most extra steps until all sessions are in, beside those that read their prompts."""


@dataclass(frozen=True)
class Workload:
    """Set how much is measured."""

    batches: tuple[int, ...] = BATCHES
    nodes: tuple[int, ...] = NODES
    rounds: int = 5
    steps: int = 12
    """Timed steps per configuration and round."""
    prompt: int = 256
    """Tokens of a prompt."""
    rate: float = RATE
    profile_s: float = 4.0

    @property
    def output(self) -> int:
        """Return the tokens of a continuation: twice what the deepest tree's steps take on average."""
        deepest = spine_length(max(self.nodes))
        expected = sum(self.rate**depth for depth in range(deepest + 1))
        return int((WARM + self.steps + 1) * min(2 * expected, deepest + 1))

    @property
    def room(self) -> int:
        """Return the KV slots of one session: its prompt, the longest output of a configuration, and a tree."""
        return self.prompt + self.longest + LIMITS.nodes

    @property
    def longest(self) -> int:
        """Return the max_tokens of a session, which none reaches."""
        return (WARM + self.steps + STRAGGLING) * (spine_length(max(self.nodes)) + 1) + LIMITS.depth

    @property
    def engine(self) -> EngineConfig:
        most = max(self.batches)
        return EngineConfig(
            # The prefix cache keeps the prompts as well, so that no arm has to read them again.
            kv_slots=most * (self.room + self.prompt),
            token_budget=(rows := max(256, most * (1 + max(self.nodes)))),
            prefill_chunk=rows,
            max_sessions=most,
            first_token_s=1e6,
        )


@dataclass(frozen=True)
class Case:
    """Describe a session that is timed."""

    prompt: tuple[int, ...]
    truth: tuple[int, ...] = ()
    """The target's continuation of the prompt."""
    sampling: SamplingParams = GREEDY


@dataclass
class ScriptedDevice(TreeDevice):
    """Act as a scripted device that knows which tokens its draft would have proposed."""

    _grown: bool = False

    def next_append(self) -> Append | None:
        self._grown = False
        return super().next_append()

    def _grow(self) -> None:
        super()._grow()
        self._grown = True

    def spine(self) -> list[int]:
        """Return the tokens down the spine of the tree offered last; empty if none was."""
        tokens: list[int] = []
        above = 0
        offered = self._offered if self._grown else None
        for row, (parent, token) in enumerate(zip(offered.parents, offered.tokens, strict=True), 1) if offered else ():
            if parent == above:  # a spine node comes before its sibling
                tokens.append(token)
                above = row
        return tokens


class SteppedEngine:
    """Hold target, draft and the engine that all configurations share, because CUDA graphs belong to one pool."""

    def __init__(
        self, target: TargetModel, draft: TargetModel, plan: Workload, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target = target
        self.plan = plan
        self._clock = clock
        cost = profile(target, plan.engine.token_budget, limit_s=plan.profile_s)
        print(f"{target.label}: {describe(cost)}")
        self.engine = Engine(TorchExecutor(target, plan.engine, cost), plan.engine)
        self.draft = PackedDraft(draft, max(plan.batches) * plan.room)
        self._visits = 0

    def continued(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases with the target's continuations, generated by plain steps."""
        length = self.plan.output
        devices = [self._device(case) for case in cases]
        self._serve(
            devices, Configuration(PLAIN), lambda steps: all(len(d.session.received) >= length for d in devices)
        )
        return [
            replace(case, truth=tuple(device.session.received[:length]))
            for case, device in zip(cases, devices, strict=True)
        ]

    def run(self, cases: Sequence[Case], arm: Configuration, seed: str, tally: TreeTally) -> TimedRound:
        """Time `plan.steps` steps with all sessions in them, after WARM more. Raises RuntimeError if it has too few."""
        devices = [self._device(case, arm.nodes, f"{seed} {arm.nodes} {i}") for i, case in enumerate(cases)]
        wanted = WARM + self.plan.steps
        steps = self._serve(devices, arm, lambda steps: sum(step.full for step in steps) >= wanted)
        for device in devices:
            tally.add(device.tally)
        diverged = frozenset(i for i, device in enumerate(devices) if diverges(device.session.received, device.truth))
        return TimedRound(tuple([step for step in steps if step.full][WARM:]), diverged)

    def _device(self, case: Case, nodes: int = 0, seed: str = "") -> ScriptedDevice:
        session = DeviceSession(case.prompt, sampling=case.sampling, max_tokens=self.plan.longest, ignore_eos=True)
        return ScriptedDevice(session, case.truth, nodes, self.plan.rate, self.target.vocab_size, Random(seed))

    def _serve(
        self, devices: Sequence[ScriptedDevice], arm: Configuration, enough: Callable[[Sequence[TimedStep]], bool]
    ) -> list[TimedStep]:
        self._visits += 1
        # Evenly allocated, a step takes all nodes that are offered.
        self.engine.allocation = by_acceptance if arm.pruned else evenly
        live = {f"visit {self._visits}, session {i}": device for i, device in enumerate(devices)}
        directive = Directive(LIMITS.nodes, LIMITS.depth, nodes_per_step=max(1, arm.nodes), draft_wait_ms=0)
        for place, (name, device) in enumerate(live.items()):
            self.engine.start(name, device.session.attach(1, LIMITS), LIMITS, directive)
            self.draft.begin(str(place), device.session.prompt)
        reading = len(devices) * self.plan.prompt // max(1, self.plan.engine.token_budget // 4)  # prompts' least share
        most = STRAGGLING + reading + max(self.plan.output, WARM + self.plan.steps)
        steps: list[TimedStep] = []
        while not enough(steps):
            if len(steps) == most:
                raise RuntimeError(f"{most} steps of {len(devices)} sessions, {arm}, were not enough")
            steps.append(self._step(live, arm))
        for name in live:
            self.engine.stop(name)
        self.engine.step()
        return steps

    def _step(self, live: Mapping[str, ScriptedDevice], arm: Configuration) -> TimedStep:
        begun = self._clock()
        appends = {name: append for name, device in live.items() if (append := device.next_append()) is not None}
        polled_s = self._clock() - begun
        draft_s = self._draft(list(live.values())) if arm.kind == SERVER else 0.0
        events, verify_s = self._verify(appends)
        begun = self._clock()
        commits = []
        for event in events:
            if not isinstance(event, Committed):
                raise RuntimeError(f"session {event.session_id} failed: {event.error}")
            live[event.session_id].on_commit(event.commit)
            commits.append(event.commit)
        whole = arm.pruned or all(commit.evaluated == arm.nodes for commit in commits)
        return TimedStep(
            draft_s=draft_s,
            verify_s=verify_s,
            devices_s=polled_s + self._clock() - begun,
            tokens=sum(len(commit.tokens) for commit in commits),
            full=whole and len(commits) == len(live),
        )

    def _draft(self, devices: Sequence[ScriptedDevice]) -> float:
        """Draft beside the target for the trees that were just offered; return the seconds that it took."""
        wishes = [
            DraftRequest(str(place), [*device.session.prompt, *device.session.received], chain)
            for place, device in enumerate(devices)
            if (chain := device.spine())
        ]
        self._synchronize()
        begun = self._clock()
        self.draft.propose(wishes)
        self._synchronize()
        return self._clock() - begun

    def _verify(self, appends: Mapping[str, Append]) -> tuple[list[Event], float]:
        self._synchronize()
        begun = self._clock()
        for name, append in appends.items():
            self.engine.append(name, append)
        events = self.engine.step()
        self._synchronize()
        return events, self._clock() - begun

    def _synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def diverges(received: Sequence[int], truth: Sequence[int]) -> bool:
    shared = min(len(received), len(truth))
    return tuple(received[:shared]) != tuple(truth[:shared])
