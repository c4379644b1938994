"""Play the same texts by streaming, under the coordinator's windows, and by what others have published.

One session at a time is played on PACED verifiers of one pace, at several round trips; the arms take turns by text.
`outrider` is the product as it comes. `ucb windows` differs in the windows alone: UCB-SpecStop decides them in the
coordinator, with each report (benchmarks.support.ucb_coordinator). `ucb rounds` is UCB-SpecStop as its authors run it:
the device chooses before each round, and waits for the answer. `specedge` is SpecEdge's scheme of rounds. No setting of
the product makes a device wait for an answer before it sends more, so these two draft by
benchmarks.support.draft_replay.rounds; and none makes a verifier wait that gains more by a step without nodes, so
theirs is told to (benchmarks.support.paced_engine). Target, draft and protocol are the same in all arms. The bandits
learn over all texts of a round trip, since they begin with ten trials.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.support.draft_replay.rounds import DIRECTIVE
from benchmarks.window.cells import interval, speed
from benchmarks.window.context import RunContext
from benchmarks.window.plan import PACED
from benchmarks.window.recording_library import POLICIES
from benchmarks.window.statics import rotated
from benchmarks.window.testbed import play

WARM_TOKENS = 16


@dataclass(frozen=True)
class PolicyArm:
    """Say on which verifier an arm is played, and how its device drafts."""

    site: str
    drafted: bool = True
    rounds: Literal["", "specedge", "ucb"] = ""

    def job(self, number: int, rtt_ms: float, tokens: int) -> SessionJob:
        return SessionJob(number, self.drafted, "cancel", tokens, rtt_ms=rtt_ms, rounds=self.rounds)


STREAMING, OUTRIDER = "streaming", "outrider"
ARMS = {
    STREAMING: PolicyArm("controller", drafted=False),
    OUTRIDER: PolicyArm("controller"),
    "ucb windows": PolicyArm("ucb"),
    "ucb rounds": PolicyArm("rounds", rounds="ucb"),
    "specedge": PolicyArm("rounds", rounds="specedge"),
}


async def play_policies(context: RunContext) -> dict[str, Any]:
    """Play every text in every arm at each round trip, on verifiers that begin anew for each."""
    found = []
    for rtt_ms in context.plan.policy_rtts_ms:
        outcomes = await _trip(context, rtt_ms)
        found.append(trip_figures(rtt_ms, outcomes))
        context.invalid.extend(not_in_rounds(rtt_ms, outcomes))
    return {"policies": found}


async def _trip(context: RunContext, rtt_ms: float) -> dict[str, list[SessionOutcome]]:
    testbed, cores, tokens = context.testbed, context.core_pairs[0], context.plan.policy_tokens
    async with contextlib.AsyncExitStack() as stack:
        sites = {
            "controller": await stack.enter_async_context(testbed.site(PACED, cores)),
            "ucb": await stack.enter_async_context(testbed.site(PACED, cores, ucb=True)),
            "rounds": await stack.enter_async_context(testbed.static_site(PACED, cores, DIRECTIVE, waits=True)),
        }
        file = context.recordings.file(POLICIES)
        swarms = {name: await stack.enter_async_context(site.swarm(file)) for name, site in sites.items()}
        for swarm in swarms.values():  # first requests are slow
            await play(swarm, [SessionJob(0, drafted=False, ending="cancel", after=min(tokens, WARM_TOKENS))], 1)
        outcomes: dict[str, list[SessionOutcome]] = {name: [] for name in ARMS}
        for number in range(len(context.recordings.recorded(POLICIES).recordings)):
            for name in rotated(list(ARMS), number):
                arm = ARMS[name]
                played = await play(swarms[arm.site], [arm.job(number, rtt_ms, tokens)], 1)
                if number >= context.plan.policy_lessons:
                    outcomes[name] += played
        for name, site in sites.items():
            context.check(site, name)
    return outcomes


def trip_figures(rtt_ms: float, outcomes: Mapping[str, Sequence[SessionOutcome]]) -> dict[str, Any]:
    """Print and return each arm's speed over streaming at one round trip, and the product's over each other arm's."""
    speeds = {name: [speed(one) for one in each] for name, each in outcomes.items()}
    found: dict[str, Any] = {
        "rtt_ms": rtt_ms,
        "texts": len(speeds[STREAMING]),
        "over_streaming": {name: _over(speeds[name], speeds[STREAMING]) for name in ARMS if name != STREAMING},
        "outrider_over": {
            name: _over(speeds[OUTRIDER], speeds[name]) for name in ARMS if name not in (STREAMING, OUTRIDER)
        },
        "tokens_per_step": {
            name: round(sum(one.tokens for one in each) / sum(one.steps for one in each), 3)
            for name, each in outcomes.items()
        },
        "step_ms": {name: round(_step_ms(each), 1) for name, each in outcomes.items()},
    }
    for name, (middle, low, high) in found["over_streaming"].items():
        print(
            f"{PACED}, {rtt_ms:g} ms, {found['texts']} texts: {name} {middle:.2f} of streaming"
            f" [{low:.2f} .. {high:.2f}], {found['tokens_per_step'][name]:.2f} tokens"
            f" in {found['step_ms'][name]:.0f} ms",
            flush=True,
        )
    return found


def not_in_rounds(rtt_ms: float, outcomes: Mapping[str, Sequence[SessionOutcome]]) -> list[str]:
    """Describe the arms whose answers came faster than rounds can: in less than a round trip and a pass."""
    least_ms = rtt_ms + PACED.pass_ms
    took_ms = {name: _step_ms(outcomes[name]) for name, arm in ARMS.items() if arm.rounds}
    return [f"{name}, {rtt_ms:g} ms: rounds of {ms:.0f} ms" for name, ms in took_ms.items() if ms < least_ms]


def _over(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the median ratio of two arms over the texts, and its 95% interval."""
    ratios = {number: [a / b] for number, (a, b) in enumerate(zip(above, below, strict=True))}
    return [round(value, 3) for value in interval(ratios)]


def _step_ms(outcomes: Sequence[SessionOutcome]) -> float:
    """Return the median time from one delivery to the next."""
    return statistics.median(gap for one in outcomes for gap in one.gaps_ms)
