"""Drive the verifier's engine in this process, step by step, with devices that follow a script, and time each step.

A scripted device knows how its text goes on, and offers a tree of draft tokens after every commit: a chain down which
each token is the target's own with probability RATE, once those above it are, with wrong tokens beside its upper part.
So a step verifies as much, and commits as much, as with a draft that is right that often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.errors import InternalError
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Append, Attach, Directive, SessionLimits, sampling_message
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT

RATE = 0.8
LIMITS = SessionLimits()
GREEDY = SamplingParams()


@dataclass
class ScriptedDevice:
    """Acts as the device of one session. truth: how its text goes on; nodes: draft tokens after every commit."""

    prompt: Sequence[int]
    tokens: int
    sampling: SamplingParams = GREEDY
    truth: Sequence[int] = ()
    nodes: int = 0

    def __post_init__(self) -> None:
        sampling = sampling_message(self.sampling)
        self.session = DeviceSession(
            Attach(prompt=self.prompt, sampling=sampling, max_tokens=self.tokens, ignore_eos=True)
        )
        self._random = Random(0)

    def next_append(self, vocabulary: int) -> Append | None:
        """Return what the device sends now: a tree if it has none, and always that no more tokens follow."""
        if self.nodes and not len(self.session.tree) and not self.session.finished:
            self._grow(vocabulary)
        return self.session.poll(resting=True)

    def _grow(self, vocabulary: int) -> None:
        """Grow a tree, two thirds of which are a chain."""
        chain = (2 * self.nodes + 2) // 3
        future = self.truth[len(self.session.received) :][:chain]
        right, parent = True, ROOT
        for depth in range(chain):
            true = future[depth] if depth < len(future) else None
            right = right and true is not None and self._random.random() < RATE
            token = true if right and true is not None else self._wrong(vocabulary, true)
            child = self.session.add(parent, token)
            if depth < self.nodes - chain:
                self.session.add(parent, self._wrong(vocabulary, true, token))
            if child is None:
                return
            parent = child

    def _wrong(self, vocabulary: int, *right: int | None) -> int:
        while (token := self._random.randrange(vocabulary)) in right:
            pass
        return token


@dataclass(frozen=True)
class Step:
    """Hold the times of one step, and how many sessions it served with all of their draft tokens."""

    seconds: float
    model_s: float
    """Time in the model's forward pass."""
    full: int


class SteppedEngine:
    """Runs an engine whose steps take every draft token that is offered.

    Time is the thread's CPU time on a CPU, so that other work on the core does not count, and the clock's on a GPU.
    """

    def __init__(self, model: TargetModel, sessions: int) -> None:
        check_numerics(model)
        self.model = model
        self.cuda = model.device.type == "cuda"
        self._clock: Callable[[], float] = time.perf_counter if self.cuda else time.thread_time
        self._model_s = 0.0
        self._forward = model.forward
        model.forward = self._timed_forward  # type: ignore[method-assign, assignment]
        config = EngineConfig(
            kv_slots=sessions * 1024,
            token_budget=max(512, 32 * sessions),
            max_sessions=sessions,
            first_token_s=1e6,
        )
        self._engine = Engine(TorchExecutor(model, config), config)
        self._engine.allocation = lambda sessions, rows, cost: (tuple(map(len, sessions)), ())
        self._served = 0

    def serve(self, devices: Sequence[ScriptedDevice], *, most: int | None = None, cached: bool = True) -> list[Step]:
        """Run steps until every device has finished, or `most` served all sessions with all of their draft tokens.

        Each step includes reading the devices' messages and writing the commits. cached: whether prompts that were
        read before are found in the prefix cache. Raises InternalError if a session fails.
        """
        self._served += 1
        live = {f"{self._served}.{number}": device for number, device in enumerate(devices)}
        nodes = max(device.nodes for device in devices)
        directive = Directive(
            window_nodes=LIMITS.nodes, window_depth=LIMITS.depth, nodes_per_step=max(1, nodes), min_acceptance=0.05
        )
        for name, device in live.items():
            attach = device.session.attach(1, LIMITS)
            self._engine.start(name, attach, LIMITS, directive, salt="" if cached else str(self._served))
        steps: list[Step] = []
        while not all(device.session.finished for device in devices):
            steps.append(self._step(live))
            if most is not None and sum(step.full == len(devices) for step in steps) >= most:
                break
        for name in live:
            self._engine.stop(name)
        self._engine.step()
        return steps

    def _step(self, live: dict[str, ScriptedDevice]) -> Step:
        appends = {
            name: sent
            for name, device in live.items()
            if (sent := device.next_append(self.model.vocab_size)) is not None
        }
        self._synchronize()
        self._model_s, begun = 0.0, self._clock()
        for name, append in appends.items():
            self._engine.append(name, append)
        events = self._engine.step()
        commits = {e.session_id: e.commit for e in events if isinstance(e, Committed)}
        seconds = self._clock() - begun
        if len(commits) < len(events):
            raise InternalError(f"a session failed: {next(e for e in events if not isinstance(e, Committed))}")
        for name, commit in commits.items():
            live[name].session.on_commit(commit)
        full = sum(commit.evaluated == live[name].nodes for name, commit in commits.items())
        return Step(seconds, self._model_s, full)

    def _timed_forward(self, *arguments: Any) -> torch.Tensor:
        self._synchronize()
        begun = self._clock()
        logits = self._forward(*arguments)
        self._synchronize()
        self._model_s += self._clock() - begun
        return logits

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.model.device)
