"""Play the same prompts with the nodes of nobody, of the device, of the verifier, and of both, at every distance.

Two verifiers of one pace run under coordinators of their own, one without sources of its own and one with n-grams,
token recycling and heads, and take turns. `streaming` is the first one without a device's nodes: plain streaming.
`no draft` is a device whose n-grams alone propose beside the verifier's sources. Sampled and greedy texts are counted
apart, and so are texts that repeat themselves.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.support.draft_replay.swarm import Swarm
from benchmarks.support.texts import repetitive
from benchmarks.window.cells import interval, speed
from benchmarks.window.context import RunContext
from benchmarks.window.plan import PACED
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
WARM_TOKENS = 16

Outcomes = dict[tuple[str, int], SessionOutcome]
"""(arm, recording) -> its session."""


@dataclass(frozen=True)
class _Sites:
    """Hold the two verifiers, each with the devices that play on it."""

    machine: VerifierMachine
    swarms: Mapping[bool, Swarm]
    """Whether the verifier has sources of its own -> devices."""

    async def play(self, arm: Arm, numbers: Sequence[int], rtt_ms: float, tokens: int) -> list[SessionOutcome]:
        """Play these recordings in one arm, as many at once as the machine has places."""
        jobs = [SessionJob(n, arm.device, "cancel", tokens, rtt_ms=rtt_ms, ngram_only=not arm.model) for n in numbers]
        at_once = self.machine.sessions
        over_s = tokens * self.machine.plain_ms / 1e3 if at_once > 1 else 0.0
        return await play(self.swarms[arm.verifier], jobs, at_once, over_s)


@contextlib.asynccontextmanager
async def _sites(context: RunContext, machine: VerifierMachine) -> Any:
    """Run both verifiers on one core: only one of them has sessions at a time."""
    cores, file = context.core_pairs[0], context.recordings.file(RECORDING)
    async with contextlib.AsyncExitStack() as stack:
        found: list[RunningVerifier] = []
        for sources in (False, True):
            found.append(await stack.enter_async_context(context.testbed.site(machine, cores, server_sources=sources)))
        swarms = [await stack.enter_async_context(site.swarm(file)) for site in found]
        sites = _Sites(machine, dict(zip((False, True), swarms, strict=True)))
        for arm in (STREAMING, CLOUD):
            await sites.play(arm, [0], 1.0, WARM_TOKENS)
        for site in found:
            if site.counts is not None:
                site.counts.begin()
        yield sites
        for site, sources in zip(found, (False, True), strict=True):
            context.check(site, "with sources of its own" if sources else "")


async def play_arms(context: RunContext) -> dict[str, Any]:
    """Play one session at every distance in all arms, and many sessions with and without speculation."""
    plan, calls = context.plan, [each.call for each in context.recordings.recorded(RECORDING).recordings]
    groups: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        sampling = "greedy" if call.sampling.greedy else "sampled"
        groups[f"{sampling}, repetitive" if repetitive(call.output) else sampling].append(number)
    distances: list[dict[str, Any]] = []
    async with _sites(context, PACED) as sites:
        for rtt_ms in plan.arm_rtts_ms:
            outcomes: Outcomes = {}
            for turn, number in enumerate(range(len(calls))):
                first = turn % len(EVERY)
                for arm in (*EVERY[first:], *EVERY[:first]):
                    [outcomes[arm.name, number]] = await sites.play(arm, [number], rtt_ms, plan.tokens_of(PACED))
            distances.append(distance_figures(rtt_ms, outcomes, groups))
    several = [await _several(context, machine, groups.get("sampled") or [0]) for machine in plan.arm_machines]
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


async def _several(context: RunContext, machine: VerifierMachine, numbers: Sequence[int]) -> dict[str, Any]:
    """Play as many sessions at once as the machine has places, streamed and with everybody's nodes."""
    tokens = context.plan.tokens_of(machine)
    played = [numbers[i % len(numbers)] for i in range(machine.sessions)]
    async with _sites(context, machine) as sites:
        slow, fast = [await sites.play(arm, played, SEVERAL_RTT_MS, tokens) for arm in (STREAMING, BOTH)]
    ratios = {i: [speed(b) / speed(a)] for i, (a, b) in enumerate(zip(slow, fast, strict=True))}
    middle, low, high = interval(ratios)
    slowest = min(ratio for [ratio] in ratios.values())
    print(
        f"{machine}, {SEVERAL_RTT_MS:g} ms: both over streaming {middle:.2f} [{low:.2f} .. {high:.2f}],"
        f" slowest {slowest:.2f}",
        flush=True,
    )
    return {
        "machine": str(machine),
        "vs_streaming": round(middle, 3),
        "vs_streaming_lower95": round(low, 3),
        "vs_streaming_upper95": round(high, 3),
        "slowest": round(slowest, 3),
    }


def summary(distances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of the last line, of sampled texts that do not repeat themselves."""
    rows = [(f"{found['rtt_ms']:g}", found["sampled"]) for found in distances if "sampled" in found]
    return {
        "both_over_best": min((row["both_over_better"] for _, row in rows), default=None),
        "both_vs_streaming": {rtt: row["over_streaming"]["both"] for rtt, row in rows},
        "no_draft_vs_streaming": {rtt: row["over_streaming"]["no draft"] for rtt, row in rows},
    }
