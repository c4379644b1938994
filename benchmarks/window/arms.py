"""Play the same prompts with the nodes of nobody, of the device, of the verifier, and of both, at every distance.

Verifiers of one pace run under coordinators of their own and take turns: one without sources of its own, and for each
arm that needs it one with n-grams, token recycling and heads. All start anew for each distance and serve a few other
texts first, so that a verifier has learned how far its sources are right, and has seen no text before it is played.
`streaming` is the one without sources, and no device's nodes: plain streaming. `no draft` is a device whose n-grams
alone propose beside the verifier's sources. Sampled and greedy texts are counted apart, and so are texts that repeat
themselves.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.support.draft_replay.recording import RecordedRequest
from benchmarks.support.draft_replay.swarm import Swarm
from benchmarks.support.texts import repetitive
from benchmarks.window.cells import interval, speed
from benchmarks.window.context import RunContext
from benchmarks.window.plan import PACED, WindowPlan
from benchmarks.window.recording_library import ARMS as RECORDING
from benchmarks.window.testbed import RunningVerifier, VerifierMachine, play


@dataclass(frozen=True)
class Arm:
    """Say who proposes nodes: the device, and with what, and the verifier."""

    name: str
    verifier: bool
    """Whether the verifier has sources of its own."""
    device: bool
    model: bool = True
    """Whether the device has a draft model, or n-grams alone."""


STREAMING, DEVICE, CLOUD = Arm("streaming", False, False), Arm("device", False, True), Arm("cloud", True, False)
BOTH, NO_DRAFT = Arm("both", True, True), Arm("no draft", True, True, model=False)
EVERY = (STREAMING, DEVICE, CLOUD, BOTH, NO_DRAFT)
SEVERAL_RTT_MS = 50.0

Outcomes = dict[tuple[str, int], SessionOutcome]
"""(arm, recording) -> its session."""


@dataclass(frozen=True)
class _Texts:
    """Hold the numbers of the recordings by their use."""

    lessons: Sequence[int]
    """Those that verifiers serve first."""
    played: Sequence[int]
    """Those of one session after the other: sampled ones, then greedy ones."""
    several: Sequence[int]
    """Sampled ones that do not repeat themselves, for many sessions at once."""
    groups: Mapping[str, Sequence[int]]
    """Kind of text -> the played ones of that kind."""

    @classmethod
    def of(cls, calls: Sequence[RecordedRequest], plan: WindowPlan) -> _Texts:
        """Divide the recordings of the arms: sampled ones, then greedy ones, each of a prompt of its own."""
        greedy = [number for number, call in enumerate(calls) if call.sampling.greedy]
        sampled = [number for number, call in enumerate(calls) if not call.sampling.greedy]
        lessons, sampled = sampled[-plan.arm_lessons :], sampled[: -plan.arm_lessons]
        groups: dict[str, list[int]] = defaultdict(list)
        played = (*sampled[: plan.arms], *greedy)
        for number in played:
            sampling = "greedy" if calls[number].sampling.greedy else "sampled"
            groups[f"{sampling}, repetitive" if repetitive(calls[number].output) else sampling].append(number)
        several = [number for number in sampled if not repetitive(calls[number].output)] or sampled
        return cls(lessons, played, several, groups)


@dataclass(frozen=True)
class _Sites:
    """Hold the verifiers and the devices that play on them; only one of them has sessions at a time."""

    machine: VerifierMachine
    swarms: Mapping[str, Swarm]
    """Name of an arm -> the devices at its verifier."""

    async def play(self, arm: Arm, numbers: Sequence[int], rtt_ms: float, tokens: int) -> list[SessionOutcome]:
        """Play these recordings in one arm, as many at once as the machine has places."""
        jobs = [SessionJob(n, arm.device, "cancel", tokens, rtt_ms=rtt_ms, ngram_only=not arm.model) for n in numbers]
        at_once = self.machine.sessions
        over_s = tokens * self.machine.plain_ms / 1e3 if at_once > 1 else 0.0
        return await play(self.swarms[arm.name], jobs, at_once, over_s)


@contextlib.asynccontextmanager
async def _sites(
    context: RunContext, machine: VerifierMachine, arms: Sequence[Arm], lessons: Sequence[int], rtt_ms: float
) -> AsyncIterator[_Sites]:
    """Run a verifier for each arm with sources of its own, one for all others, and play the lessons in all arms but the
    first, plain streaming."""
    cores, file = context.core_pairs[0], context.recordings.file(RECORDING)
    async with contextlib.AsyncExitStack() as stack:
        sites: dict[str, RunningVerifier] = {}
        plain: RunningVerifier | None = None
        for arm in arms:
            site = None if arm.verifier else plain
            if site is None:
                starting = context.testbed.site(machine, cores, server_sources=arm.verifier)
                site = await stack.enter_async_context(starting)
            plain = plain if arm.verifier else site
            sites[arm.name] = site
        swarms = {name: await stack.enter_async_context(site.swarm(file)) for name, site in sites.items()}
        running = _Sites(machine, swarms)
        for arm in arms[1:]:
            await running.play(arm, lessons, rtt_ms, context.plan.tokens_of(machine))
        apart = {arm.name: sites[arm.name] for arm in arms if arm.verifier or arm is STREAMING}
        for site in apart.values():
            if site.counts is not None:
                site.counts.begin()
        yield running
        for name, site in apart.items():
            context.check(site, name)


async def play_arms(context: RunContext) -> dict[str, Any]:
    """Play one session at every distance in all arms, and many sessions with and without speculation."""
    plan = context.plan
    texts = _Texts.of([one.call for one in context.recordings.recorded(RECORDING).recordings], plan)
    distances: list[dict[str, Any]] = []
    for rtt_ms in plan.arm_rtts_ms:
        outcomes: Outcomes = {}
        async with _sites(context, PACED, EVERY, texts.lessons, rtt_ms) as sites:
            for turn, number in enumerate(texts.played):
                first = turn % len(EVERY)
                for arm in (*EVERY[first:], *EVERY[:first]):
                    [outcomes[arm.name, number]] = await sites.play(arm, [number], rtt_ms, plan.tokens_of(PACED))
        distances.append(distance_figures(rtt_ms, outcomes, texts.groups))
    several = [await _several(context, machine, texts) for machine in plan.arm_machines]
    return {"arms": distances, "arms_several": several} | summary(distances)


def distance_figures(rtt_ms: float, outcomes: Outcomes, groups: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Print and return the figures of one distance, by group of texts."""
    found: dict[str, Any] = {"rtt_ms": rtt_ms}
    for group, numbers in sorted(groups.items()):
        rates = {arm.name: {n: speed(outcomes[arm.name, n]) for n in numbers} for arm in EVERY}
        over = {name: {n: [rate[n] / rates["streaming"][n]] for n in numbers} for name, rate in rates.items()}
        speedups = {name: interval(ratios) for name, ratios in over.items()}
        best = max(("device", "cloud"), key=lambda name: speedups[name][0])
        against = [rates["both"][n] / rates[best][n] for n in numbers]
        steps = {
            arm.name: sum(outcomes[arm.name, n].tokens for n in numbers)
            / sum(outcomes[arm.name, n].steps for n in numbers)
            for arm in EVERY
        }
        found[group] = {
            "texts": len(numbers),
            "over_streaming": {name: round(middle, 3) for name, (middle, _, _) in speedups.items()},
            "over_streaming_95": {name: [round(low, 3), round(high, 3)] for name, (_, low, high) in speedups.items()},
            "tokens_per_step": {name: round(value, 3) for name, value in steps.items()},
            "better": best,
            "both_over_better": round(statistics.median(against), 3),
        }
        shown = ", ".join(
            f"{arm.name} {speedups[arm.name][0]:.2f}x ({steps[arm.name]:.2f} tokens a step)" for arm in EVERY[1:]
        )
        print(
            f"{PACED}, {rtt_ms:g} ms, {len(numbers)} {group} texts: {shown};"
            f" both over {best} {found[group]['both_over_better']:.2f}",
            flush=True,
        )
    return found


async def _several(context: RunContext, machine: VerifierMachine, texts: _Texts) -> dict[str, Any]:
    """Play as many sessions at once as the machine has places, in all arms, in several rounds.

    A place has another text in each round, on verifiers that begin anew, and the arms come in another order.
    `least_better` is the least that the better round of any place has.
    """
    tokens, rounds = context.plan.tokens_of(machine), context.plan.arm_rounds
    places = range(machine.sessions)
    ratios: dict[str, dict[int, list[float]]] = {arm.name: {place: [] for place in places} for arm in EVERY[1:]}
    for turn in range(rounds):
        played = [texts.several[(place + turn) % len(texts.several)] for place in places]
        async with _sites(context, machine, EVERY, texts.lessons, SEVERAL_RTT_MS) as sites:
            first = turn * len(EVERY) // rounds
            rates = {
                arm.name: [speed(one) for one in await sites.play(arm, played, SEVERAL_RTT_MS, tokens)]
                for arm in (*EVERY[first:], *EVERY[:first])
            }
        for name, each in ratios.items():
            for place in places:
                each[place].append(rates[name][place] / rates[STREAMING.name][place])
    found: dict[str, dict[str, float]] = {}
    for name, each in ratios.items():
        middle, low, high = interval(each)
        slowest = min(statistics.median(of) for of in each.values())
        better = min(max(of) for of in each.values())
        found[name] = {"median": middle, "lower95": low, "upper95": high, "slowest": slowest, "least_better": better}
        found[name] = {key: round(value, 3) for key, value in found[name].items()}
        print(
            f"{machine}, {SEVERAL_RTT_MS:g} ms, {rounds} rounds: {name} over streaming {middle:.2f}"
            f" [{low:.2f} .. {high:.2f}], the slowest place {slowest:.2f}, at least {better:.2f} in its better round",
            flush=True,
        )
    return {"machine": str(machine), "rounds": rounds, "texts": len(texts.several), "over_streaming": found}


def summary(distances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of the last line: the least of all kinds of texts, and speeds of sampled ones that do not repeat
    themselves."""
    rows = [(f"{found['rtt_ms']:g}", found["sampled"]) for found in distances if "sampled" in found]
    return {
        "both_over_best": min(
            (row["both_over_better"] for found in distances for row in found.values() if isinstance(row, dict)),
            default=None,
        ),
        "both_vs_streaming": {rtt: row["over_streaming"]["both"] for rtt, row in rows},
        "no_draft_vs_streaming": {rtt: row["over_streaming"]["no draft"] for rtt, row in rows},
    }
