"""Trace the engine's loop step by step: the tokens that each step commits, and the seconds of each of its parts.

The real EngineLoop reads requests from a real socket pair and writes events to it; the devices at the other end act
between two steps of the loop, so their time is in no figure. Time is the thread's own CPU time, so that other work on
the core does not count.

Nodes are weighed by acceptance and cost as in service, and then taken as requested, regardless of the threshold.
"""

from __future__ import annotations

import contextlib
import cProfile
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

from benchmarks.support.engine_driver.scripted_trees import TreeDevice
from benchmarks.support.even_allocation import evenly
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.row_allocation import Acceptances, CostCurve, NodeCounts, by_acceptance
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.ipc import EngineEnd, frame
from cloud_verifier.engine_process.loop import EngineLoop
from outrider.core.protocol.messages import Commit, Directive, SessionLimits
from outrider.wire import codecs
from outrider.wire.v1 import engine_pb2 as pb

T = TypeVar("T")

LIMITS = SessionLimits()
SEAMS = {
    "_decide": "schedule",
    "append": "protocol",
    "_prepare": "prepare",
    "_commit": "commit",
}
"""Method of the Engine -> the part of a step that it carries out."""
EXECUTOR_SEAMS = {"run": "pack", "_verify": "verify"}
"""Method of the TorchExecutor -> the part of a step that it carries out."""
PLAN = "attention plan"


class PartTimer:
    """Sum up a thread's seconds by part, without those of nested parts, so that the parts sum to the whole."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.wall_seconds = 0.0
        """Wall time in the outermost parts until now."""
        self._clock = clock
        self._began = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        if not self._stack:
            self._began = time.perf_counter()
        self._book()
        self._stack.append(name)

    def leave(self) -> None:
        self._book()
        self._stack.pop()
        if not self._stack:
            self.wall_seconds += time.perf_counter() - self._began

    def _book(self) -> None:
        now = self._clock()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def timed(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **kwargs: Any) -> T:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


class ProfiledPartTimer(PartTimer):
    """Profile the engine's functions, but not those of the model's forward pass."""

    def __init__(self, profile: cProfile.Profile) -> None:
        super().__init__()
        self._profile = profile

    def _book(self) -> None:
        super()._book()
        self._profile.disable()

    def _resume(self) -> None:
        if self._stack and self._stack[-1] != "forward":
            self._profile.enable()

    def enter(self, name: str) -> None:
        super().enter(name)
        self._resume()

    def leave(self) -> None:
        super().leave()
        self._resume()


@dataclass(frozen=True)
class TracedStep:
    """Hold the timed parts of one step of the engine's loop."""

    parts: Mapping[str, float]
    """Seconds by part."""
    commits: tuple[Commit, ...]
    wall_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def outside(self) -> float:
        """Return the share of the time that is spent outside the model's forward pass."""
        return 1.0 - self.parts.get("forward", 0.0) / self.seconds


class TimedEngineEnd(EngineEnd):
    """Wrap the engine's end of the socket. A step of the loop ends with `send`; then `between` is called, untimed."""

    def __init__(self, sock: socket.socket, parts: PartTimer, between: Callable[[list[pb.EngineEvent]], None]) -> None:
        super().__init__(sock)
        self._parts = parts
        self._between = between

    def receive(self, timeout_s: Callable[[], float | None]) -> Iterator[pb.EngineRequest]:
        following = self._parts.timed("decode", partial(next, super().receive(timeout_s), None))
        while (request := following()) is not None:
            yield request

    def send(self, events: list[pb.EngineEvent]) -> None:
        self._parts.timed("encode", super().send)(events)
        if any(event.HasField("stats") for event in events):
            return  # they follow a turn's events, and count as part of the next turn
        self._parts.leave()
        self._between(events)
        self._parts.enter("loop")


def threshold_but_even(sessions: Sequence[Acceptances], rows: int, cost: CostCurve, beside: float) -> NodeCounts:
    """Compute a threshold by acceptance and cost as in service; then take the nodes to be timed, whatever it is."""
    by_acceptance(sessions, rows, cost, beside)
    return evenly(sessions, rows, cost)


class TracedEngine:
    """Run an engine whose parts are timed, and the loop that serves devices with it."""

    def __init__(self, model: TargetModel, config: EngineConfig | None = None, parts: PartTimer | None = None) -> None:
        self.model = model
        config = config or EngineConfig()
        self._executor = TorchExecutor(model, config)
        self.engine = Engine(self._executor, config)
        self.engine.allocation = threshold_but_even
        self.parts = parts or PartTimer()
        self._visits = 0
        for owner, seams in self._owners():
            for method in seams:
                if not hasattr(owner, method):
                    print(f"{type(owner).__name__} has no {method}: `{seams[method]}` is not timed apart")

    def serve(
        self,
        devices: Sequence[TreeDevice],
        *,
        nodes: int = 0,
        enough: Callable[[Sequence[TracedStep]], bool] = lambda turns: False,
        salt: str = "",
    ) -> list[TracedStep]:
        """Run steps until every device has finished, or there are enough. Raises RuntimeError if a session fails.

        nodes: that a step takes of a session. salt: requests of another one find nothing of theirs in the prefix cache.
        """
        self._visits += 1
        with contextlib.ExitStack() as stack:
            front, back = (stack.enter_context(sock) for sock in socket.socketpair())
            visit = _Visit(f"visit {self._visits}", devices, front, self.parts, enough)
            visit.start(Directive(nodes_per_step=max(1, nodes)), salt)
            loop = EngineLoop(self.engine, TimedEngineEnd(back, self.parts, visit.between))
            for seam in self._seams(loop):
                stack.enter_context(seam)
            self.parts.take()
            self.parts.enter("loop")
            loop.run()
            self.parts.leave()
        return visit.turns

    def _seams(self, loop: EngineLoop) -> Iterator[Any]:
        """Yield the patches that time the parts of a step."""
        timed = self.parts.timed
        yield patch.object(codecs, "append_from_checked", timed("decode", codecs.append_from_checked))
        yield patch.object(loop, "_event", timed("encode", loop._event))
        yield patch.object(self.model, "forward", timed("forward", self.model.forward))
        yield patch.object(self.model.attention, "plan", timed(PLAN, self._planned(self.model.attention.plan)))
        for owner, seams in self._owners():
            for method, part in seams.items():
                if hasattr(owner, method):
                    yield patch.object(owner, method, timed(part, getattr(owner, method)))

    def _owners(self) -> list[tuple[object, Mapping[str, str]]]:
        return [(self.engine, SEAMS), (self._executor, EXECUTOR_SEAMS)]

    def _planned(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """Return `plan`, but count the building of indices and masks, in the first layer of sdpa, as part of it."""

        def planned(*args: Any) -> Any:
            made = plan(*args)
            if hasattr(made, "_layout"):
                made._layout = self.parts.timed(PLAN, made._layout)
            return made

        return planned


class _Visit:
    """Act as the other end of the socket: devices by name receive commits and send Appends between the steps."""

    def __init__(
        self,
        label: str,
        devices: Sequence[TreeDevice],
        front: socket.socket,
        parts: PartTimer,
        enough: Callable[[Sequence[TracedStep]], bool],
    ) -> None:
        self.turns: list[TracedStep] = []
        self._devices = {f"{label}, session {i}": device for i, device in enumerate(devices)}
        self._front = front
        self._parts = parts
        self._enough = enough
        self._over = False
        self._wall_seconds = parts.wall_seconds
        """What the parts had taken when the last step ended."""

    def start(self, directive: Directive, salt: str) -> None:
        for name, device in self._devices.items():
            start = pb.Start(
                attach=codecs.attach_to_proto(device.session.attach(1, LIMITS)),
                limits=codecs.limits_to_proto(LIMITS),
                directive=codecs.directive_to_proto(directive),
                salt=salt,
            )
            self._request(name, start=start)
        self._speak()

    def between(self, events: list[pb.EngineEvent]) -> None:
        """Record the finished step, deliver its events, and send what the next one will read."""
        taken, wall = self._parts.take(), self._parts.wall_seconds - self._wall_seconds
        self._wall_seconds += wall
        if self._over:
            return
        if events:
            self._front.recv(1 << 20)  # the same is at hand as messages
        commits = []
        for event in events:
            if event.HasField("failure"):
                raise RuntimeError(f"{event.session_id or 'the engine'} failed: {event.failure.message}")
            if event.HasField("commit"):
                commits.append(codecs.commit_from_proto(event.commit))
                self._devices[event.session_id].on_commit(commits[-1])
        self.turns.append(TracedStep(taken, tuple(commits), wall))
        self._speak()

    def _speak(self) -> None:
        live = {name: device for name, device in self._devices.items() if not device.session.finished}
        self._over = not live or self._enough(self.turns)
        for name, device in live.items():
            if not self._over and (append := device.next_append()) is not None:
                self._request(name, append=codecs.append_to_proto(append))
        if self._over:
            for name in self._devices:
                self._request(name, stop=pb.Stop())
            self._request("", quit=pb.Quit())

    def _request(self, name: str, **kind: Any) -> None:
        self._front.sendall(frame(pb.EngineRequest(session_id=name, epoch=1, **kind)))
