"""Play the links on which something changes in mid-session, both at once on a core each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.window.cell_player import watched
from benchmarks.window.cells import ObservedWindow
from benchmarks.window.context import RunContext
from benchmarks.window.plan import CHANGING, ChangingLink
from benchmarks.window.testbed import CorePair, play
from benchmarks.window.transitions import (
    AFTER_S,
    ChangePeriod,
    Transition,
    began_s,
    middle,
    over_time,
    periods_of_draft,
    periods_of_link,
    summary,
    transition,
    worst,
)

LOOK_S = 0.1


@dataclass
class PlayedLink:
    """Hold what was measured over one changing link."""

    transitions: list[Transition] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    """Speed and window of the first session over time, for the plot."""


async def play_transitions(context: RunContext) -> dict[str, Any]:
    pairs = zip(context.plan.changing_links, context.core_pairs, strict=True)
    playing = [partial(_play, context, *one) for one in pairs]
    played = await context.each(playing, [CHANGING])
    found = [each for line in played for each in line.transitions]
    worst_cases = summary(found)
    for each in worst_cases.values():
        settled = "was not seen to settle" if each.settle_s is None else f"settled in {each.settle_s:.1f} s"
        print(
            f"{CHANGING!s:<34}{each.name}: {each.vs_streaming:.2f} of streaming in the {AFTER_S:g} s after,"
            f" {settled}, {each.changes} changes of the window; each of the worst session",
            flush=True,
        )
    return {
        "transition": {
            "settle_s": worst(each.settle_s for each in worst_cases.values()),
            "settle_s_median": middle(each.settle_s for each in found),
            "vs_streaming": min(each.vs_streaming for each in worst_cases.values()),
            "changes": max(each.changes for each in worst_cases.values()),
        },
        "transitions": [asdict(each) for each in found],
        "series": [each for line in played for each in line.series],
    }


async def _play(context: RunContext, line: ChangingLink, cores: CorePair) -> PlayedLink:
    plan, recordings, found = context.plan, context.recordings, PlayedLink()
    async with (
        context.testbed.site(CHANGING, cores) as site,
        site.swarm(recordings.file("changes"), line.changes) as swarm,
    ):
        await play(swarm, [SessionJob(0, ending="cancel", after=8, rtt_ms=line.rtt_ms)], 1)  # whatever is slow at first
        for number in range(len(recordings.recorded("changes").recordings)):
            plain = SessionJob(number, False, "cancel", plan.plain_change_tokens, rtt_ms=line.rtt_ms)
            (streamed,) = await play(swarm, [plain], 1)
            observations: list[ObservedWindow] = []
            async with watched(site, observations, LOOK_S):
                job = SessionJob(
                    number, True, "cancel", plan.change_tokens, line.rtt_ms, line.wrong_span, plan.change_s
                )
                (outcome,) = await play(swarm, [job], 1)
            seen = [each for each in observations if each.session_id == outcome.session_id]
            periods = _periods(line, outcome)
            found.transitions += [transition(period, outcome, streamed, seen) for period in periods]
            if not number:
                found.series.append(_series(line, outcome, streamed, seen, periods))
        context.check(site)
    return found


def _periods(line: ChangingLink, outcome: SessionOutcome) -> list[ChangePeriod]:
    return periods_of_link(outcome, line.changes) if line.changes else periods_of_draft(outcome, line.wrong_span)


def _series(
    line: ChangingLink,
    outcome: SessionOutcome,
    streamed: SessionOutcome,
    seen: Sequence[ObservedWindow],
    periods: Sequence[ChangePeriod],
) -> dict[str, Any]:
    """Return speed and window of one session over time, for the plot."""
    begun = began_s(outcome)
    return {
        "name": str(line),
        "adaptive": list(over_time(outcome)),
        "streaming": list(over_time(streamed)),
        "k": [(each.at_s - begun, each.k) for each in seen],
        "depth": [(each.at_s - begun, each.depth) for each in seen],
        "changes": [(period.since_s - begun, period.name) for period in periods],
    }
