"""A simulated fleet around the real controller: 10,000 devices, 100 verifiers, nobody's hardware.

What is simulated: devices with a distance, a drafting speed and a kind of text; sessions that come and go; verifiers
whose steps take `a + b n` until they are full and more beyond. What is real: coordinator.window.controller, which sees
of a session what a verifier reports of it: the verdicts on its last positions, round trip, drafting time. What its
decision brings is then found on text that it has not seen: the streaming model on the next verdicts, each verifier's
step as long as all its sessions together make it. Four fleets get the same sessions: all stream, one static window for
all, the controller, and the controller asked for goodput alone, which shows what it costs that nobody pays for others.

Nothing here says how fast Outrider is: the streaming model is on both sides. It says whether the controller's decisions
stay fair, steady and better than one window for everybody, where a thousand sessions differ.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from coordinator.window.controller import Decision, SessionView, VerifierView, decide
from coordinator.window.streaming import Speed, Way, Window, replay
from outrider.core.step_cost import StepCost
from outrider.core.verdicts import HIT, MISS, SIBLING

STATIC = Window(24, 6, nodes_per_level=1.6)
"""For everybody: what a near device with a good draft likes."""
STREAMING = Window(0, 0)
DECIDED_EVERY = 4
"""Seconds; a verifier's turn comes with its number."""
LIFE_S = 45.0
"""Mean length of a session."""
SEEN = 128
"""Verdicts of a session that are reported."""
LEAST = 24
"""Before which a session is judged by its kind of text alone."""
NODES_PER_LEVEL = 1.6
KINDS = {"code": (0.92, 0.70), "arithmetic": (0.88, 0.60), "chat": (0.75, 0.45), "prose": (0.60, 0.30)}
"""First guesses that are right in easy and in hard stretches of the text."""
STRETCH = 25
"""Mean tokens of a stretch: matches are not independent of one another."""
CAUGHT = 0.4
"""Of misses, by a sibling."""


@dataclass(frozen=True)
class Scale:
    devices: int = 10_000
    verifiers: int = 100
    seconds: int = 40

    @classmethod
    def quick(cls) -> Scale:
        return cls(600, 6, 16)


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


@dataclass
class Session:
    """One device's, with its window."""

    name: str
    text: Text
    rtt_s: float
    draft_s: float
    ends_s: float
    window: Window = STREAMING
    greedy: Window = STREAMING
    """As it would be for goodput alone."""
    seen: bytes = b""
    changes: int = 0
    lived_s: int = 0

    def view(self, prior: bytes) -> SessionView:
        verdicts = self.seen if len(self.seen) >= LEAST else (prior + self.seen)[-SEEN:]
        return SessionView(self.name, verdicts, self.rtt_s, self.draft_s, NODES_PER_LEVEL, self.window)

    def obey(self, fair: Decision, greedy: Decision) -> None:
        self.changes += fair.window.k != self.window.k and self.lived_s > 0
        self.window, self.greedy = fair.window, greedy.window


@dataclass
class Verifier:
    """A second of it at a time."""

    cost: StepCost
    sessions: list[Session] = field(default_factory=list)
    prior: dict[str, bytes] = field(default_factory=dict)
    """By kind of text: what was last seen of it."""

    def view(self) -> VerifierView:
        views = tuple(s.view(self.prior.get(s.text.kind, bytes([HIT, MISS] * 32))) for s in self.sessions)
        return VerifierView(self.cost, views)

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

    def live(self, tokens_per_s: Iterable[float]) -> None:
        """A second passes."""
        for session, speed in zip(self.sessions, tokens_per_s, strict=True):
            session.seen = (session.seen + session.text.take(round(speed)))[-SEEN:]
            session.lived_s += 1
            self.prior[session.text.kind] = session.seen


def _lived(session: Session, window: Window, step_s: float) -> Speed:
    expected = 1.0 if window.k == 0 else 4.0
    verdicts = session.text.ahead(max(8, math.ceil(expected / step_s)))
    return replay(verdicts, Way(session.rtt_s, session.draft_s, lambda nodes: step_s), window)


class Fleet:
    """Devices that open sessions, and verifiers that take them."""

    def __init__(self, scale: Scale, seed: int = 1) -> None:
        self.scale = scale
        self._rng = random.Random(seed)
        self.verifiers = [Verifier(step_cost(self._rng.choice((128, 256, 512)))) for _ in range(scale.verifiers)]
        self._opened = 0
        self.ended: list[Session] = []
        for _ in range(scale.devices):
            self._open(0.0)

    def turn(self, now_s: float) -> None:
        """Who is through leaves, and another device opens a session."""
        for verifier in self.verifiers:
            through = [session for session in verifier.sessions if session.ends_s <= now_s]
            verifier.sessions = [session for session in verifier.sessions if session.ends_s > now_s]
            self.ended += through
            for _ in through:
                self._open(now_s)

    @property
    def sessions(self) -> Iterator[Session]:
        for verifier in self.verifiers:
            yield from verifier.sessions

    def _open(self, now_s: float) -> None:
        """On the less loaded of two verifiers, as the coordinator would."""
        rng = self._rng
        self._opened += 1
        rtt_s = min(0.5, rng.lognormvariate(math.log(0.045), 0.8))
        draft_s = rng.lognormvariate(math.log(0.004), 0.7)
        text = Text(rng.choice(tuple(KINDS)), random.Random(rng.random()))
        session = Session(f"s{self._opened}", text, rtt_s, draft_s, now_s + rng.expovariate(1.0 / LIFE_S))
        two = rng.sample(self.verifiers, min(2, len(self.verifiers)))
        min(two, key=lambda verifier: len(verifier.sessions)).sessions.append(session)


FLEETS = ("static", "controller", "goodput alone")


@dataclass
class Tally:
    """What the fleets delivered, by session and second."""

    over_streaming: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FLEETS})
    tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("streaming", *FLEETS), 0.0))
    decided_s: list[float] = field(default_factory=list)
    """CPU time of one verifier's decisions."""

    def add(self, streaming: float, count: int, speeds: Mapping[str, Sequence[float]]) -> None:
        """A second of one verifier. streaming: of each of its sessions, if all of them did."""
        self.tokens["streaming"] += count * streaming
        for name, each in speeds.items():
            self.tokens[name] += sum(each)
            self.over_streaming[name] += [speed / streaming for speed in each]


def simulate(fleet: Fleet, each: Callable[..., Iterable[Any]] = map) -> Tally:
    """The first seconds, in which nobody has been decided about, are left out. each: a `map`, of a pool perhaps."""
    tally = Tally()
    for second in range(fleet.scale.seconds):
        fleet.turn(float(second))
        live = [verifier for verifier in fleet.verifiers if verifier.sessions]
        due = [verifier for i, verifier in enumerate(live) if (second + i) % DECIDED_EVERY == 0]
        for verifier, (fair, greedy, seconds) in zip(due, each(_decided, [v.view() for v in due]), strict=True):
            tally.decided_s.append(seconds)
            for session in verifier.sessions:
                session.obey(fair[session.name], greedy[session.name])
        for verifier in live:
            count = len(verifier.sessions)
            controlled = verifier.second([session.window for session in verifier.sessions])
            if second >= 2 * DECIDED_EVERY:
                speeds = {
                    "static": verifier.second([STATIC] * count),
                    "controller": controlled,
                    "goodput alone": verifier.second([session.greedy for session in verifier.sessions]),
                }
                tally.add(1.0 / verifier.cost.seconds(count, count), count, speeds)
            verifier.live(controlled)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tally


def _decided(view: VerifierView) -> tuple[dict[str, Decision], dict[str, Decision], float]:
    begun = time.process_time()
    fair = dict(decide(view))
    seconds = time.process_time() - begun
    return fair, dict(decide(view, tolerance=1.0)), seconds


def report(fleet: Fleet, tally: Tally) -> dict[str, Any]:
    """Print a table; what the last line says."""
    lived = [*fleet.ended, *fleet.sessions]
    changes = sum(session.changes for session in lived) / (sum(session.lived_s for session in lived) / 60.0)
    found: dict[str, dict[str, float]] = {
        "goodput_over_streaming": {},
        "slower_than_streaming": {},
        "p1": {},
        "p50": {},
    }
    print(f"{'':<14}{'goodput':>9}{'p1':>7}{'p5':>7}{'p50':>7}{'p95':>7}   session-seconds below 0.97 of streaming")
    for name in FLEETS:
        ratios = sorted(tally.over_streaming[name])
        goodput = tally.tokens[name] / tally.tokens["streaming"]
        slower = sum(ratio < 0.97 for ratio in ratios) / len(ratios)
        p1, p5, p50, p95 = (ratios[int(share * len(ratios))] for share in (0.01, 0.05, 0.5, 0.95))
        print(f"{name:<14}{goodput:>8.2f}x{p1:>7.2f}{p5:>7.2f}{p50:>7.2f}{p95:>7.2f}   {slower:.1%}")
        for key, value in zip(found, (goodput, slower, p1, p50), strict=True):
            found[key][name] = round(value, 3)
    cost_s = statistics.median(tally.decided_s)
    print(
        f"k changed {changes:.2f} times a session and minute; deciding for a verifier took {cost_s:.3f} s of CPU time"
    )
    return found | {"k_changes_per_minute": round(changes, 2), "decide_s_p50": round(cost_s, 4)}


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="600 devices, 6 verifiers")
    scale = Scale.quick() if parser.parse_args().quick else Scale()
    print(f"SIMULATED: {scale.devices} devices, {scale.verifiers} verifiers, {scale.seconds} s")
    fleet = Fleet(scale)
    with ProcessPoolExecutor(max_workers=2) as pool:
        tally = simulate(fleet, pool.map)
    harness.finish({"simulated": True} | report(fleet, tally))


if __name__ == "__main__":
    asyncio.run(main())
