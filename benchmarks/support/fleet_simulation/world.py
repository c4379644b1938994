"""Simulate devices and their texts, sessions that come and go, and the verifiers that take them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.support.fleet_simulation import optimum
from benchmarks.support.fleet_simulation.optimum import AcceptanceProcess, SessionTruth
from coordinator.records import Window, WindowDecision
from coordinator.window.controller import SessionView, VerifierView
from coordinator.window.replay_tables import replay_all
from coordinator.window.report_adapter import RECENT, latest
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry

STREAMING = Window(0, 0)
LIFE_S = 45.0
"""Mean length of a session."""
NODES_PER_LEVEL = 1.6
KINDS = {"code": (0.92, 0.70), "arithmetic": (0.88, 0.60), "chat": (0.75, 0.45), "prose": (0.60, 0.30)}
"""Share of first proposals that are right, in easy and in hard passages of the text."""
PASSAGE = 25
"""Mean tokens of a passage, since matches depend on one another."""
CAUGHT = 0.4
"""Share of misses that a sibling catches."""


@dataclass(frozen=True)
class FleetSize:
    devices: int = 10_000
    verifiers: int = 100
    regions: int = 10
    """Number of regions; a device's sessions are all in its own."""
    seconds: int = 8
    """Simulated seconds: time for two decisions about every verifier."""

    @property
    def region(self) -> FleetSize:
        return FleetSize(self.devices // self.regions, self.verifiers // self.regions, 1, self.seconds)


def step_cost(rows: int) -> StepCost:
    """Return the cost of a step on a GPU: 30 ms and 0.05 ms a row until `rows` of them, then 0.4 ms each."""
    return StepCost({1: 0.030, rows: 0.030 + 0.00005 * rows, 8 * rows: 0.030 + 0.00005 * rows + 0.0004 * 7 * rows})


class SimulatedText:
    """Draw the acceptance outcomes of a draft on one session's text, passage by passage."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind = kind
        self._rng = rng
        self._easy = rng.random() < 0.5
        self._to_come = bytearray()

    def ahead(self, count: int) -> bytes:
        """Return the next outcomes without taking them."""
        draw, (easy, hard) = self._rng.random, KINDS[self.kind]
        for _ in range(count - len(self._to_come)):
            if draw() < 1.0 / PASSAGE:
                self._easy = not self._easy
            right = draw() < (easy if self._easy else hard)
            self._to_come.append(HIT if right else SIBLING if draw() < CAUGHT else MISS)
        return bytes(self._to_come[:count])

    def take(self, count: int) -> bytes:
        outcomes = self.ahead(count)
        del self._to_come[:count]
        return outcomes


@dataclass(frozen=True)
class SimulatedDevice:
    kind: str
    rtt_s: float
    draft_s: float

    @classmethod
    def drawn(cls, rng: random.Random) -> SimulatedDevice:
        rtt_s = min(0.5, rng.lognormvariate(math.log(0.045), 0.8))
        return cls(rng.choice(tuple(KINDS)), rtt_s, rng.lognormvariate(math.log(0.004), 0.7))

    @property
    def truth(self) -> SessionTruth:
        process = AcceptanceProcess(*KINDS[self.kind], flip=1.0 / PASSAGE, caught=CAUGHT)
        return SessionTruth(process, self.rtt_s, self.draft_s, NODES_PER_LEVEL)


@dataclass
class SimulatedSession:
    """Hold the session of one device, with its speculation window."""

    name: str
    device: SimulatedDevice
    text: SimulatedText
    ends_s: float
    window: Window | None = None
    """Its window; None until the first decision, while it streams."""
    seen: bytes = b""
    changes: int = 0
    lived_s: int = 0

    def known(self, prior: bytes) -> bytes:
        """Return its outcomes, after the prior's until it has enough of its own."""
        return self.seen if len(self.seen) >= RECENT else prior + self.seen

    def view(self, history: bytes) -> SessionView:
        """Return the controller's view. history: its outcomes, or a prior's, that the decision is made from."""
        telemetry = SessionTelemetry(
            self.name,
            rtt_ms=1e3 * self.device.rtt_s,
            acceptance_history=history,
            draft_ms=1e3 * self.device.draft_s,
            nodes_per_level=NODES_PER_LEVEL,
        )
        return SessionView(telemetry, self.window)

    def obey(self, decision: WindowDecision) -> None:
        self.changes += self.window is not None and decision.window.k != self.window.k
        self.window = decision.window


@dataclass
class SimulatedVerifier:
    """Simulate a verifier, one second at a time."""

    number: int
    cost: StepCost
    sessions: list[SimulatedSession] = field(default_factory=list)
    prior: dict[str, bytes] = field(default_factory=dict)
    """The last acceptance history seen, by kind of text."""

    def view(self) -> VerifierView:
        known = [s.known(self.prior.get(s.device.kind, bytes([HIT, MISS] * 32))) for s in self.sessions]
        views = (session.view(history) for session, history in zip(self.sessions, latest(known), strict=True))
        return VerifierView(self.cost, tuple(views))

    @property
    def truth(self) -> optimum.OptimalVerifier:
        count = len(self.sessions)
        cost = self.cost
        return optimum.OptimalVerifier(
            tuple(session.device.truth for session in self.sessions), lambda nodes: cost.curve(count + nodes, count)
        )

    def second(self, windows: Sequence[Window]) -> list[float]:
        """Return tokens per second of each session with these windows, on text that the controller has not seen.

        Nobody waits for drafts, because in a batch the step goes on for the other sessions.
        """
        times_s = np.array([(session.device.rtt_s, session.device.draft_s) for session in self.sessions])
        shape = np.array([(window.k, window.depth, window.nodes_per_level or 1.0) for window in windows])
        count = len(windows)
        step_s = self.cost.seconds(count, count)
        tokens_per_step = np.ones(count)
        for _ in range(2):  # a step's length hangs on the nodes in it, and they on its length
            ahead = [max(8, math.ceil((4.0 if window.k else 1.0) / step_s)) for window in windows]
            outcomes = [session.text.ahead(length) for session, length in zip(self.sessions, ahead, strict=True)]
            k, depth = shape[:, :2].astype(np.int64).T[:, :, None]
            rtt, draft = (times_s / step_s).T[:, :, None]
            _, steps, levels = replay_all(outcomes, rtt, draft, k, depth)
            tokens_per_step = ahead / steps[:, 0]
            nodes = (levels[:, 0] * shape[:, 2] / steps[:, 0]).sum()
            step_s = self.cost.seconds(round(count + nodes), count)
        return (tokens_per_step / step_s).tolist()

    def live(self, tokens_per_s: Sequence[float]) -> None:
        """Let a second pass in which sessions receive so many tokens."""
        for session, speed in zip(self.sessions, tokens_per_s, strict=True):
            session.seen = (session.seen + session.text.take(round(speed)))[-RECENT:]
            session.lived_s += 1
            self.prior[session.device.kind] = session.seen


class SimulatedFleet:
    """Simulate a region's devices, which open sessions, and its verifiers."""

    def __init__(self, scale: FleetSize, open_share: float = 1.0, seed: int = 1) -> None:
        self.scale = scale
        self._rng = random.Random(seed)
        self.verifiers = [
            SimulatedVerifier(scale.verifiers * seed + i, step_cost(self._rng.choice((128, 256, 512))))
            for i in range(scale.verifiers)
        ]
        self._names = itertools.count(1)
        self._idle = [SimulatedDevice.drawn(self._rng) for _ in range(scale.devices)]
        self.ended: list[SimulatedSession] = []
        for _ in range(round(open_share * scale.devices)):
            self._under_way(self._open(0.0))

    def turn(self, now_s: float) -> None:
        """End the sessions that are finished, and let as many devices open one."""
        for verifier in self.verifiers:
            through = [session for session in verifier.sessions if session.ends_s <= now_s]
            verifier.sessions = [session for session in verifier.sessions if session.ends_s > now_s]
            self.ended += through
            for session in through:
                self._idle.append(session.device)
                self._open(now_s)

    @property
    def sessions(self) -> Iterator[SimulatedSession]:
        for verifier in self.verifiers:
            yield from verifier.sessions

    def _open(self, now_s: float) -> SimulatedSession:
        """Open a session on the less loaded of two verifiers, as the coordinator would."""
        rng = self._rng
        at = rng.randrange(len(self._idle))
        self._idle[at], self._idle[-1] = self._idle[-1], self._idle[at]
        device = self._idle.pop()
        text = SimulatedText(device.kind, random.Random(rng.random()))
        session = SimulatedSession(f"s{next(self._names)}", device, text, now_s + rng.expovariate(1.0 / LIFE_S))
        two = rng.sample(self.verifiers, min(2, len(self.verifiers)))
        min(two, key=lambda verifier: len(verifier.sessions)).sessions.append(session)
        return session

    def _under_way(self, session: SimulatedSession) -> None:
        """Let a session have streamed for a while, since the simulation begins in the middle of a fleet's life."""
        age_s = self._rng.expovariate(1.0 / LIFE_S)
        session.lived_s = round(age_s)
        session.seen = session.text.take(min(RECENT, round(age_s * 30.0)))
