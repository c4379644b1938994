"""Play devices that compute their draft beside recorded ones, with the same texts over the same links.

A recorded device waits for as long as a pass of the draft took after pauses like a device's, and its core is free
meanwhile. A live one computes the pass on the devices' core, beside its own messages, the emulated link and the
coordinator. All else is the same in both: the client of the SDK, its process, and what it has learned of its draft
before. Both are compared with plain streaming, one session at a time; the three take turns by text.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.window.cell_player import WARM_TOKENS
from benchmarks.window.cells import interval, over, speed
from benchmarks.window.context import RunContext
from benchmarks.window.testbed import VerifierMachine, play

DRAFT = "good"
STREAMING, REPLAYED, LIVE = "streaming", "replayed", "live"
ARMS = (STREAMING, REPLAYED, LIVE)


async def play_live(context: RunContext) -> dict[str, Any]:
    """Play the plan's texts in all three arms, on each of its machines and at each of its distances."""
    return {"live": [row for machine in context.plan.live_machines for row in await _machine(context, machine)]}


async def _machine(context: RunContext, machine: VerifierMachine) -> list[dict[str, Any]]:
    plan, recordings = context.plan, context.recordings
    numbers = range(min(plan.live, recordings.prompts(DRAFT)))

    def job(arm: str, number: int, rtt_ms: float) -> SessionJob:
        tokens = plan.tokens_of(machine)
        return SessionJob(number, arm != STREAMING, "cancel", tokens, rtt_ms=rtt_ms, live=arm == LIVE)

    found = []
    async with (
        context.testbed.site(machine, context.core_pairs[0]) as site,
        site.swarm(recordings.file(DRAFT), draft=recordings.drafts[DRAFT]) as swarm,
    ):
        await play(swarm, [replace(job(arm, numbers[0], 1.0), after=WARM_TOKENS) for arm in ARMS], 1)
        for rtt_ms in plan.live_rtts_ms:
            outcomes: dict[str, list[SessionOutcome]] = {arm: [] for arm in ARMS}
            for turn, number in enumerate(numbers):
                for arm in harness.rotated(ARMS, turn):
                    outcomes[arm] += await play(swarm, [job(arm, number, rtt_ms)], 1)
            found.append(live_figures(machine, rtt_ms, outcomes))
        context.check(site, "live")
    return found


def live_figures(
    machine: VerifierMachine, rtt_ms: float, outcomes: Mapping[str, Sequence[SessionOutcome]]
) -> dict[str, Any]:
    """Print and return the speeds at one distance. outcomes: of each arm, of the same texts in the same order."""
    compared = {
        "live_vs_streaming": (LIVE, STREAMING),
        "replayed_vs_streaming": (REPLAYED, STREAMING),
        "replayed_over_live": (REPLAYED, LIVE),
    }
    ratios = {name: interval(over([outcomes[a]], [outcomes[b]])) for name, (a, b) in compared.items()}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {middle:.2f} [{low:.2f} .. {high:.2f}]"
        for name, (middle, low, high) in ratios.items()
    )
    per_step = {arm: sum(o.tokens for o in played) / sum(o.steps for o in played) for arm, played in outcomes.items()}
    print(
        f"{machine!s:<34}{rtt_ms:>5.0f} ms, {len(outcomes[LIVE])} texts: {shown};"
        f" {per_step[LIVE]:.2f} tokens a step live, {per_step[REPLAYED]:.2f} replayed",
        flush=True,
    )
    found: dict[str, Any] = {"machine": str(machine), "rtt_ms": rtt_ms, "texts": len(outcomes[LIVE])}
    for name, (middle, low, high) in ratios.items():
        found |= {name: round(middle, 3), f"{name}_95": [round(low, 3), round(high, 3)]}
    return found | {
        "tokens_per_s": {arm: round(statistics.median(map(speed, played)), 2) for arm, played in outcomes.items()},
        "tokens_per_step": {arm: round(value, 3) for arm, value in per_step.items()},
    }
