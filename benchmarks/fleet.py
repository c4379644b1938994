"""Simulate a fleet around the real window controller: 10,000 devices and 100 verifiers of no real hardware.

Devices with a distance, a drafting speed and a kind of text are simulated, as are sessions that come and go, and
verifiers whose steps take `a + b n` until they are full and more beyond. coordinator.window.controller is real; of a
session it sees what a verifier reports: the acceptance history of its last positions, round trip and drafting time.

There are two loads. Crowded: every device has a session open, about 100 to a verifier. Light: one device in five has
one, about 20 to a verifier. Every fourth verifier is judged once, right after its second decision (the first one has no
former window to keep), with six sets of windows: one static window for all; the controller's; the controller's if it
maximised goodput alone, which shows the cost of slowing nobody down; those of UCB-SpecStop
(benchmarks.support.ucb_specstop); and the optimum of either (benchmarks.support.fleet_simulation.optimum), which shares
nothing with the controller and knows the true acceptances.

UCB-SpecStop has a bandit for each session, which has chosen once a second for as long as the session is old, a minute
at most, from the tokens of that second. It chooses k; the depth follows by the controller's rule. Before a session's
time streaming stands in its place. It promises nobody anything, so its share is of the optimum of goodput alone.

The same module judges the long run of each text; the streaming model's figure for the next second of text, which the
controller has not seen, is reported beside it. The whole fleet, whose windows are decided every few seconds, shows
fairness and stability over time.

The benchmark does not show how fast Outrider is. It shows how fair, how steady and how close to the optimum the
controller's decisions are, beside those of one window for everybody.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support import harness
from benchmarks.support.fleet_simulation.optimum import StaticRequest
from benchmarks.support.fleet_simulation.world import (
    NODES_PER_LEVEL,
    STREAMING,
    FleetSize,
    SimulatedFleet,
    SimulatedVerifier,
)
from benchmarks.support.harness import Criterion
from benchmarks.support.ucb_specstop import UcbSpecStop
from coordinator.records import Window, WindowDecision
from coordinator.window.controller import SPARE, TOLERANCE, decide

STATIC = Window(6, 24, nodes_per_level=1.6)
"""A static window for everybody, chosen for a near device with a good draft."""
DECIDED_EVERY = 4
"""Seconds between decisions; a verifier's offset follows from its number."""
JUDGED = 4
"""One verifier of so many is judged."""
LOADS = {"crowded": 1.0, "light": 0.2}
"""Share of the devices that have a session open at once."""
UCB = "UCB-SpecStop"
LEARNED_S = 60
"""Most seconds that a session's bandit has learned for: three in four sessions are younger."""
KEYS = (
    "simulated",
    "devices",
    "seconds",
    "vs_optimum",
    "vs_optimum_by_load",
    "vs_optimum_alone",
    "slowest_over_streaming",
    "promise_broken",
    "cpu_s",
    "by_load",
)
"""Keys of the last line."""
COMPARED = ("controller", UCB)
"""Fleets whose slowest sessions stand in the last line."""
FLEETS = ("static", "controller", "goodput alone", UCB)
BOUNDS = {"controller": "optimum", "goodput alone": "optimum alone", UCB: "optimum alone"}
"""Fleet -> the optimum that bounds it."""
OPTIMA = ("optimum", "optimum alone")


@dataclass(frozen=True)
class JudgedVerifier:
    """Hold each session's speed over streaming on one verifier right after a decision, by set of windows."""

    streaming: float
    """Tokens per second, all sessions together."""
    long_run: Mapping[str, Sequence[float]]
    next_second: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, verifier: SimulatedVerifier, decisions: Mapping[str, WindowDecision]) -> JudgedVerifier:
        greedy = decide(verifier.view(), tolerance=1.0)
        windows = {
            "static": [STATIC] * len(verifier.sessions),
            "controller": [decisions[session.name].window for session in verifier.sessions],
            "goodput alone": [greedy[session.name].window for session in verifier.sessions],
            UCB: learned_windows(verifier),
        }
        truth = verifier.truth
        outcomes = {name: truth.outcome([StaticRequest(w.k, w.depth) for w in each]) for name, each in windows.items()}
        outcomes |= {"optimum": truth.best(TOLERANCE), "optimum alone": truth.best(1.0)}
        return cls(
            len(verifier.sessions) / truth.plain_s,
            {name: outcome.over_streaming(truth.plain_s) for name, outcome in outcomes.items()},
            {name: [truth.plain_s * each for each in verifier.second(w)] for name, w in windows.items()},
        )


@dataclass
class FleetTally:
    """Hold the figures of one region, or of several."""

    judged: list[JudgedVerifier] = field(default_factory=list)
    over_streaming: list[float] = field(default_factory=list)
    """Speed over streaming of every session and second after the first decisions."""
    decided_s: list[float] = field(default_factory=list)
    """CPU time of one verifier's decisions."""
    changes: int = 0
    """Changes of k after the first decisions."""
    verifiers: int = 0

    @classmethod
    def of_all(cls, tallies: Sequence[FleetTally]) -> FleetTally:
        return cls(
            [one for tally in tallies for one in tally.judged],
            [one for tally in tallies for one in tally.over_streaming],
            [one for tally in tallies for one in tally.decided_s],
            sum(tally.changes for tally in tallies),
            sum(tally.verifiers for tally in tallies),
        )

    def shares(self, name: str, of: str = "long_run") -> list[float]:
        """Return each session's speed over streaming, in ascending order."""
        return sorted(share for one in self.judged for share in getattr(one, of)[name])

    def goodput(self, name: str, of: str = "long_run") -> float:
        """Return the fleet's tokens per second over those of plain streaming."""
        each = ((one.streaming, statistics.fmean(getattr(one, of)[name])) for one in self.judged)
        return sum(streaming * share for streaming, share in each) / sum(one.streaming for one in self.judged)

    def vs_optimum(self, name: str = "controller") -> float:
        """Return the goodput over that of the optimum that bounds it."""
        return self.goodput(name) / self.goodput(BOUNDS[name])

    def promise_broken(self, name: str) -> float:
        """Return the share of sessions that are slower than streaming by more than the controller allows."""
        shares = self.shares(name)
        return sum(share < 1.0 - TOLERANCE for share in shares) / len(shares)


def learned_windows(verifier: SimulatedVerifier, most_s: int = LEARNED_S) -> list[Window]:
    """Return the windows that UCB-SpecStop gives the sessions now, if it has had each since it was opened.

    most_s: seconds that are simulated for it, on a copy of the verifier.
    """
    played = copy.deepcopy(verifier)
    plain_s = played.cost.seconds(len(played.sessions), len(played.sessions))
    ages_s = [min(most_s, session.lived_s) for session in played.sessions]
    ahead = [math.ceil(session.device.rtt_s / plain_s) + SPARE for session in played.sessions]
    bandits = [UcbSpecStop() for _ in played.sessions]

    def chosen(left_s: int) -> list[Window]:
        each = zip(bandits, ahead, ages_s, strict=True)
        levels = ((bandit.choose(), more) if age_s >= left_s else (0, 0) for bandit, more, age_s in each)
        return [Window(k, k + more, 0.0, NODES_PER_LEVEL) if k else STREAMING for k, more in levels]

    for left_s in range(max(ages_s), 0, -1):
        windows = chosen(left_s)
        speeds = played.second(windows)
        played.live(speeds)
        for bandit, window, speed in zip(bandits, windows, speeds, strict=True):
            if window.k:
                bandit.observe(window.k, 1.0, speed, round(1.0 / plain_s))
    return chosen(0)


def simulate(fleet: SimulatedFleet) -> FleetTally:
    """Simulate a fleet. The first seconds, in which every verifier decides once, are left out."""
    tally = FleetTally(verifiers=len(fleet.verifiers))
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


def _second(verifier: SimulatedVerifier, second: int, seconds: int, tally: FleetTally) -> None:
    if (second + verifier.number) % DECIDED_EVERY == 0:
        view = verifier.view()
        begun = time.process_time()
        decisions = decide(view)
        tally.decided_s.append(time.process_time() - begun)
        if second + DECIDED_EVERY >= seconds and verifier.number % JUDGED == 0:
            tally.judged.append(JudgedVerifier.of(verifier, decisions))
        for session in verifier.sessions:
            session.obey(decisions[session.name])
    speeds = verifier.second([session.window or STREAMING for session in verifier.sessions])
    if second >= DECIDED_EVERY:
        count = len(verifier.sessions)
        plain_s = verifier.cost.seconds(count, count)
        tally.over_streaming += [plain_s * speed for speed in speeds]
    verifier.live(speeds)


def report(load: str, tally: FleetTally) -> dict[str, Any]:
    """Print a table; return the figures of the last line for this load."""
    count = sum(len(one.long_run["controller"]) for one in tally.judged)
    print(
        f"\n{load}: {len(tally.judged)} of {tally.verifiers} verifiers judged once, {count} sessions; over streaming:"
    )
    print(
        f"{'':<15}{'goodput':>8}{'slowest':>8}{'p1':>6}{'p50':>6}{'p95':>6}{'<0.97':>7}{'<0.98':>7}"
        "   next second: goodput, <0.97"
    )
    for name in (*FLEETS, *OPTIMA):
        shares = tally.shares(name)
        p1, p50, p95 = (shares[int(part * len(shares))] for part in (0.01, 0.5, 0.95))
        line = f"{name:<15}{tally.goodput(name):>7.3f}x{shares[0]:>8.2f}{p1:>6.2f}{p50:>6.2f}{p95:>6.2f}"
        line += f"{_slow(shares):>7.1%}{tally.promise_broken(name):>7.1%}"
        if name in FLEETS:
            then = tally.shares(name, "next_second")
            line += f"{tally.goodput(name, 'next_second'):>14.3f}x{_slow(then):>14.1%}"
        print(line)
    print("of its optimum: " + ", ".join(f"{n} {tally.vs_optimum(n):.3f} of the {of}" for n, of in BOUNDS.items()))
    changes = tally.changes / (len(tally.over_streaming) / 60.0)
    cost_s = statistics.median(tally.decided_s)
    print(
        f"all verifiers, every second, by the controller's own model: {_slow(tally.over_streaming):.1%} of"
        " session-seconds below 0.97 of streaming"
    )
    print(
        f"k changed {changes:.2f} times a session and minute; deciding for a verifier took {cost_s:.3f} s of CPU time"
    )
    return {
        "vs_optimum": round(tally.vs_optimum(), 4),
        "vs_optimum_alone": round(tally.vs_optimum("goodput alone"), 4),
        "ucb_vs_optimum_alone": round(tally.vs_optimum(UCB), 4),
        "promise_broken": {n: round(tally.promise_broken(n), 4) for n in FLEETS},
        "judged": len(tally.judged),
        "goodput_over_streaming": {n: round(tally.goodput(n), 3) for n in (*FLEETS, *OPTIMA)},
        "slowest_over_streaming": {n: round(tally.shares(n)[0], 3) for n in (*FLEETS, *OPTIMA)},
        "k_changes_per_minute": round(changes, 2),
        "decide_s_p50": round(cost_s, 4),
    }


def _slow(shares: Sequence[float]) -> float:
    return sum(share < 0.97 for share in shares) / len(shares)


def _region(job: tuple[FleetSize, float, int]) -> FleetTally:
    scale, open_share, seed = job
    return simulate(SimulatedFleet(scale, open_share, seed))


def _cpu_s() -> float:
    """Return the user time of this process and of the children that have ended."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run(scale: FleetSize, workers: int = 2) -> dict[str, Any]:
    """Return the figures of the last line.

    workers: processes that simulate regions; 1 simulates all of them in this process. The figure `seconds` is of this
    machine, from the first region to the last.
    """
    begun, cpu_s = time.perf_counter(), _cpu_s()
    jobs = [(scale.region, share, seed) for share in LOADS.values() for seed in range(scale.regions)]
    if workers == 1:
        tallies = [_region(job) for job in jobs]
    else:
        # Each worker is a core's worth: threads under its matrix products would only be in one another's way.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            tallies = list(pool.map(_region, jobs))
    by_load = {
        load: report(load, FleetTally.of_all(tallies[i * scale.regions : (i + 1) * scale.regions]))
        for i, load in enumerate(LOADS)
    }
    vs_optimum = {load: found["vs_optimum"] for load, found in by_load.items()}
    alone = {"goodput alone": "vs_optimum_alone", UCB: "ucb_vs_optimum_alone"}
    return {
        "simulated": True,
        "devices": scale.devices,
        "seconds": round(time.perf_counter() - begun, 1),
        "vs_optimum": min(vs_optimum.values()),
        "vs_optimum_by_load": vs_optimum,
        "vs_optimum_alone": {name: min(found[key] for found in by_load.values()) for name, key in alone.items()},
        "slowest_over_streaming": {
            name: min(found["slowest_over_streaming"][name] for found in by_load.values()) for name in COMPARED
        },
        "promise_broken": {name: max(found["promise_broken"][name] for found in by_load.values()) for name in COMPARED},
        "cpu_s": round(_cpu_s() - cpu_s, 1),
        "by_load": by_load,
    }


def main(argv: Sequence[str] | None = None) -> None:
    size = harness.arguments("fleet", __doc__).parse_args(argv).size
    scale = size.pick(smoke=FleetSize(60, 1, 1), quick=FleetSize(600, 6, 2), full=FleetSize())
    print(
        f"SIMULATED: {scale.devices} devices, {scale.verifiers} verifiers in {scale.regions} regions, {scale.seconds} s"
    )
    found = run(scale, workers=size.pick(smoke=1, quick=2, full=2))
    goals = [
        Criterion.bound(
            "share of sessions that the controller makes slower than streaming by over 2%",
            found["promise_broken"]["controller"],
            at_most=0.0,
            enforced_from=None,
        ),
        *(
            Criterion.bound(
                f"{load}: goodput of the controller over that of one window for everybody",
                by_load["goodput_over_streaming"]["controller"] / by_load["goodput_over_streaming"]["static"],
                at_least=1.0,
                enforced_from=None,
            )
            for load, by_load in found["by_load"].items()
        ),
    ]
    harness.finish(found, goals, size)


if __name__ == "__main__":
    main()
