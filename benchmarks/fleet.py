"""A simulated fleet around the real controller: 10,000 devices, 100 verifiers, nobody's hardware.

What is simulated: devices with a distance, a drafting speed and a kind of text; sessions that come and go; verifiers
whose steps take `a + b n` until they are full and more beyond. What is real: coordinator.window.controller, which sees
of a session what a verifier reports of it: the verdicts on its last positions, round trip, drafting time.

Two loads. Crowded: every device has a session open, about 100 to a verifier. Light: one device in five has, about 20
to a verifier. Every fourth verifier is judged once, right after a decision, with five sets of windows: one static window
for all, the controller's, the controller's for goodput alone, which shows what it costs that nobody pays for others,
and the optimum of either (fleet_optimum.py), which shares nothing with the controller and knows the true survivals.
The judge is fleet_optimum's too; what the streaming model says of the next second of text, which the controller has
not seen, stands beside it. The whole fleet, decided about every few seconds, shows fairness and stability over time.

Nothing here says how fast Outrider is. It says whether the controller's decisions stay fair, steady, near what could be
had, and better than one window for everybody, where a thousand sessions differ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import fleet_optimum, harness
from benchmarks.fleet_optimum import Asked, Process, Truth
from coordinator.window.control import LEAST, RECENT
from coordinator.window.controller import TOLERANCE, Decision, SessionView, VerifierView, decide
from coordinator.window.streaming import Speed, Way, Window, replay
from outrider.core.step_cost import StepCost
from outrider.core.verdicts import HIT, MISS, SIBLING

STATIC = Window(24, 6, nodes_per_level=1.6)
"""For everybody: what a near device with a good draft likes."""
STREAMING = Window(0, 0)
DECIDED_EVERY = 4
"""Seconds; a verifier's turn comes with its number."""
JUDGED = 4
"""Of so many verifiers one is judged."""
LIFE_S = 45.0
"""Mean length of a session."""
NODES_PER_LEVEL = 1.6
KINDS = {"code": (0.92, 0.70), "arithmetic": (0.88, 0.60), "chat": (0.75, 0.45), "prose": (0.60, 0.30)}
"""First guesses that are right in easy and in hard stretches of the text."""
STRETCH = 25
"""Mean tokens of a stretch: matches are not independent of one another."""
CAUGHT = 0.4
"""Of misses, by a sibling."""


LOADS = {"crowded": 1.0, "light": 0.2}
"""Share of the devices that have a session open at once."""


@dataclass(frozen=True)
class Scale:
    devices: int = 10_000
    verifiers: int = 100
    regions: int = 10
    """A device's sessions are all in its own."""
    seconds: int = 2 * DECIDED_EVERY

    @classmethod
    def quick(cls) -> Scale:
        return cls(600, 6, 2)

    @property
    def region(self) -> Scale:
        return Scale(self.devices // self.regions, self.verifiers // self.regions, 1, self.seconds)


def step_cost(rows: int) -> StepCost:
    """A GPU: 30 ms and 0.05 ms a row until `rows` of them, then 0.4 ms each."""
    return StepCost({1: 0.030, rows: 0.030 + 0.00005 * rows, 8 * rows: 0.030 + 0.00005 * rows + 0.0004 * 7 * rows})


class Text:
    """The verdicts that a draft would get on one session's text, stretch by stretch."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind = kind
        self._rng = rng
        self._easy = rng.random() < 0.5
        self._to_come: deque[int] = deque()

    def ahead(self, count: int) -> bytes:
        """The next ones, which stay to come."""
        while len(self._to_come) < count:
            self._to_come.append(self._next())
        return bytes(self._to_come[i] for i in range(count))

    def take(self, count: int) -> bytes:
        verdicts = self.ahead(count)
        for _ in range(count):
            self._to_come.popleft()
        return verdicts

    def _next(self) -> int:
        if self._rng.random() < 1.0 / STRETCH:
            self._easy = not self._easy
        if self._rng.random() < KINDS[self.kind][not self._easy]:
            return HIT
        return SIBLING if self._rng.random() < CAUGHT else MISS


@dataclass(frozen=True)
class Device:
    kind: str
    rtt_s: float
    draft_s: float

    @classmethod
    def drawn(cls, rng: random.Random) -> Device:
        rtt_s = min(0.5, rng.lognormvariate(math.log(0.045), 0.8))
        return cls(rng.choice(tuple(KINDS)), rtt_s, rng.lognormvariate(math.log(0.004), 0.7))

    @property
    def truth(self) -> Truth:
        process = Process(*KINDS[self.kind], flip=1.0 / STRETCH, caught=CAUGHT)
        return Truth(process, self.rtt_s, self.draft_s, NODES_PER_LEVEL)


@dataclass
class Session:
    """One device's, with its window."""

    name: str
    device: Device
    text: Text
    ends_s: float
    window: Window | None = None
    """None until it has been decided about; it streams."""
    seen: bytes = b""
    changes: int = 0
    lived_s: int = 0

    def view(self, prior: bytes) -> SessionView:
        """prior: verdicts on its kind of text, by which it is judged while it is new."""
        verdicts = self.seen if len(self.seen) >= LEAST else (prior + self.seen)[-RECENT:]
        device = self.device
        return SessionView(self.name, verdicts, device.rtt_s, device.draft_s, NODES_PER_LEVEL, self.window)

    def obey(self, decision: Decision) -> None:
        self.changes += self.window is not None and decision.window.k != self.window.k
        self.window = decision.window


@dataclass
class Verifier:
    """A second of it at a time."""

    number: int
    cost: StepCost
    sessions: list[Session] = field(default_factory=list)
    prior: dict[str, bytes] = field(default_factory=dict)
    """By kind of text: what was last seen of it."""

    def view(self) -> VerifierView:
        views = tuple(s.view(self.prior.get(s.device.kind, bytes([HIT, MISS] * 32))) for s in self.sessions)
        return VerifierView(self.cost, views)

    @property
    def truth(self) -> fleet_optimum.Verifier:
        count = len(self.sessions)
        cost = self.cost
        return fleet_optimum.Verifier(
            tuple(session.device.truth for session in self.sessions), lambda nodes: cost.curve(count + nodes, count)
        )

    def second(self, windows: Sequence[Window]) -> list[float]:
        """Tokens per second of each session with these windows, on text that the controller has not seen."""
        count = len(self.sessions)
        step_s = self.cost.seconds(count, count)
        speeds: list[Speed] = []
        for _ in range(2):  # a step's length hangs on the nodes in it, and they on its length
            speeds = [_lived(one, window, step_s) for one, window in zip(self.sessions, windows, strict=True)]
            nodes = sum(speed.nodes / speed.steps for speed in speeds)
            step_s = self.cost.seconds(round(count + nodes), count)
        return [speed.tokens_per_step / step_s for speed in speeds]

    def live(self, tokens_per_s: Sequence[float]) -> None:
        """A second passes."""
        for session, speed in zip(self.sessions, tokens_per_s, strict=True):
            session.seen = (session.seen + session.text.take(round(speed)))[-RECENT:]
            session.lived_s += 1
            self.prior[session.device.kind] = session.seen


def _lived(session: Session, window: Window, step_s: float) -> Speed:
    """Without patience: in a batch nobody waits, the others' step goes on."""
    expected = 1.0 if window.k == 0 else 4.0
    verdicts = session.text.ahead(max(8, math.ceil(expected / step_s)))
    way = Way(session.device.rtt_s, session.device.draft_s, lambda nodes: step_s)
    return replay(verdicts, way, replace(window, patience_s=0.0))


class Fleet:
    """A region's devices that open sessions, and verifiers that take them."""

    def __init__(self, scale: Scale, open_share: float = 1.0, seed: int = 1) -> None:
        self.scale = scale
        self._rng = random.Random(seed)
        self.verifiers = [
            Verifier(scale.verifiers * seed + i, step_cost(self._rng.choice((128, 256, 512))))
            for i in range(scale.verifiers)
        ]
        self._names = itertools.count(1)
        self._idle = [Device.drawn(self._rng) for _ in range(scale.devices)]
        self.ended: list[Session] = []
        for _ in range(round(open_share * scale.devices)):
            self._under_way(self._open(0.0))

    def turn(self, now_s: float) -> None:
        """Who is through leaves, and as many devices open a session."""
        for verifier in self.verifiers:
            through = [session for session in verifier.sessions if session.ends_s <= now_s]
            verifier.sessions = [session for session in verifier.sessions if session.ends_s > now_s]
            self.ended += through
            for session in through:
                self._idle.append(session.device)
                self._open(now_s)

    @property
    def sessions(self) -> Iterator[Session]:
        for verifier in self.verifiers:
            yield from verifier.sessions

    def _open(self, now_s: float) -> Session:
        """On the less loaded of two verifiers, as the coordinator would."""
        rng = self._rng
        at = rng.randrange(len(self._idle))
        self._idle[at], self._idle[-1] = self._idle[-1], self._idle[at]
        device = self._idle.pop()
        text = Text(device.kind, random.Random(rng.random()))
        session = Session(f"s{next(self._names)}", device, text, now_s + rng.expovariate(1.0 / LIFE_S))
        two = rng.sample(self.verifiers, min(2, len(self.verifiers)))
        min(two, key=lambda verifier: len(verifier.sessions)).sessions.append(session)
        return session

    def _under_way(self, session: Session) -> None:
        """The fleet is met in the middle of its life: this session has been streaming for a while."""
        session.seen = session.text.take(min(RECENT, round(self._rng.expovariate(1.0 / LIFE_S) * 30.0)))


FLEETS = ("static", "controller", "goodput alone")
BOUNDS = {"controller": "optimum", "goodput alone": "optimum alone"}
"""What could have been had instead."""


@dataclass(frozen=True)
class Judged:
    """One verifier right after a decision: by name, each session's speed over streaming."""

    streaming: float
    """Tokens per second, all sessions together."""
    long_run: Mapping[str, Sequence[float]]
    next_second: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, verifier: Verifier, decisions: Mapping[str, Decision]) -> Judged:
        greedy = decide(verifier.view(), tolerance=1.0)
        windows = {
            "static": [STATIC] * len(verifier.sessions),
            "controller": [decisions[session.name].window for session in verifier.sessions],
            "goodput alone": [greedy[session.name].window for session in verifier.sessions],
        }
        truth = verifier.truth
        outcomes = {name: truth.outcome([Asked(w.k, w.depth) for w in each]) for name, each in windows.items()}
        outcomes |= {"optimum": truth.best(TOLERANCE), "optimum alone": truth.best(1.0)}
        return cls(
            len(verifier.sessions) / truth.plain_s,
            {name: outcome.over_streaming(truth.plain_s) for name, outcome in outcomes.items()},
            {name: [truth.plain_s * each for each in verifier.second(w)] for name, w in windows.items()},
        )


@dataclass
class Tally:
    """What was found in one region, or in several."""

    judged: list[Judged] = field(default_factory=list)
    over_streaming: list[float] = field(default_factory=list)
    """Of every session and second after the first decisions."""
    decided_s: list[float] = field(default_factory=list)
    """CPU time of one verifier's decisions."""
    changes: int = 0
    """Of k, after the first decisions."""
    verifiers: int = 0

    @classmethod
    def of_all(cls, tallies: Sequence[Tally]) -> Tally:
        return cls(
            [one for tally in tallies for one in tally.judged],
            [one for tally in tallies for one in tally.over_streaming],
            [one for tally in tallies for one in tally.decided_s],
            sum(tally.changes for tally in tallies),
            sum(tally.verifiers for tally in tallies),
        )

    def shares(self, name: str, of: str = "long_run") -> list[float]:
        """Each session's speed over streaming, rising."""
        return sorted(share for one in self.judged for share in getattr(one, of)[name])

    def goodput(self, name: str, of: str = "long_run") -> float:
        """Over streaming's."""
        each = ((one.streaming, statistics.fmean(getattr(one, of)[name])) for one in self.judged)
        return sum(streaming * share for streaming, share in each) / sum(one.streaming for one in self.judged)

    def vs_optimum(self, name: str = "controller") -> float:
        return self.goodput(name) / self.goodput(BOUNDS[name])


def simulate(fleet: Fleet) -> Tally:
    """In the first seconds every verifier is decided about once; they are left out."""
    tally = Tally(verifiers=len(fleet.verifiers))
    for second in range(fleet.scale.seconds):
        fleet.turn(float(second))
        if second == DECIDED_EVERY:
            for session in fleet.sessions:
                session.changes = 0
        for verifier in fleet.verifiers:
            if verifier.sessions:
                _second(verifier, second, fleet.scale.seconds, tally)
    tally.changes = sum(session.changes for session in (*fleet.ended, *fleet.sessions))
    return tally


def _second(verifier: Verifier, second: int, seconds: int, tally: Tally) -> None:
    if (second + verifier.number) % DECIDED_EVERY == 0:
        view = verifier.view()
        begun = time.process_time()
        decisions = decide(view)
        tally.decided_s.append(time.process_time() - begun)
        if second + DECIDED_EVERY >= seconds and verifier.number % JUDGED == 0:
            tally.judged.append(Judged.of(verifier, decisions))
        for session in verifier.sessions:
            session.obey(decisions[session.name])
    speeds = verifier.second([session.window or STREAMING for session in verifier.sessions])
    if second >= DECIDED_EVERY:
        count = len(verifier.sessions)
        plain_s = verifier.cost.seconds(count, count)
        tally.over_streaming += [plain_s * speed for speed in speeds]
    verifier.live(speeds)


def report(load: str, tally: Tally) -> dict[str, Any]:
    """Print a table; what the last line says of this load."""
    count = sum(len(one.long_run["controller"]) for one in tally.judged)
    print(
        f"\n{load}: {len(tally.judged)} of {tally.verifiers} verifiers judged once, {count} sessions; over streaming:"
    )
    print(
        f"{'':<15}{'goodput':>8}{'slowest':>8}{'p1':>6}{'p50':>6}{'p95':>6}{'<0.97':>7}   next second: goodput, <0.97"
    )
    for name in (*FLEETS, *BOUNDS.values()):
        shares = tally.shares(name)
        p1, p50, p95 = (shares[int(part * len(shares))] for part in (0.01, 0.5, 0.95))
        line = f"{name:<15}{tally.goodput(name):>7.3f}x{shares[0]:>8.2f}{p1:>6.2f}{p50:>6.2f}{p95:>6.2f}"
        line += f"{_slow(shares):>7.1%}"
        if name in FLEETS:
            then = tally.shares(name, "next_second")
            line += f"{tally.goodput(name, 'next_second'):>14.3f}x{_slow(then):>14.1%}"
        print(line)
    changes = tally.changes / (len(tally.over_streaming) / 60.0)
    cost_s = statistics.median(tally.decided_s)
    print(f"all verifiers, every second: {_slow(tally.over_streaming):.1%} of session-seconds below 0.97 of streaming")
    print(
        f"k changed {changes:.2f} times a session and minute; deciding for a verifier took {cost_s:.3f} s of CPU time"
    )
    return {
        "vs_optimum": round(tally.vs_optimum(), 4),
        "vs_optimum_alone": round(tally.vs_optimum("goodput alone"), 4),
        "judged": len(tally.judged),
        "goodput_over_streaming": {n: round(tally.goodput(n), 3) for n in (*FLEETS, *BOUNDS.values())},
        "slowest_over_streaming": {n: round(tally.shares(n)[0], 3) for n in (*FLEETS, *BOUNDS.values())},
        "k_changes_per_minute": round(changes, 2),
        "decide_s_p50": round(cost_s, 4),
    }


def _slow(shares: Sequence[float]) -> float:
    return sum(share < 0.97 for share in shares) / len(shares)


def _region(job: tuple[Scale, float, int]) -> Tally:
    scale, open_share, seed = job
    return simulate(Fleet(scale, open_share, seed))


def run(scale: Scale, workers: int = 2) -> dict[str, Any]:
    """What the last line says. seconds: of this machine, from the first region to the last."""
    begun = time.perf_counter()
    jobs = [(scale.region, share, seed) for share in LOADS.values() for seed in range(scale.regions)]
    # Each worker is a core's worth: threads under its matrix products would only be in one another's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        tallies = list(pool.map(_region, jobs))
    by_load = {
        load: report(load, Tally.of_all(tallies[i * scale.regions : (i + 1) * scale.regions]))
        for i, load in enumerate(LOADS)
    }
    vs_optimum = {load: found["vs_optimum"] for load, found in by_load.items()}
    return {
        "simulated": True,
        "devices": scale.devices,
        "seconds": round(time.perf_counter() - begun, 1),
        "vs_optimum": min(vs_optimum.values()),
        "vs_optimum_by_load": vs_optimum,
        "cpu_s": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, 1),
        "by_load": by_load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="600 devices, 6 verifiers")
    scale = Scale.quick() if parser.parse_args().quick else Scale()
    print(
        f"SIMULATED: {scale.devices} devices, {scale.verifiers} verifiers in {scale.regions} regions, {scale.seconds} s"
    )
    harness.finish(run(scale))


if __name__ == "__main__":
    main()
