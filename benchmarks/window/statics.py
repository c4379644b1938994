"""Compare the adaptive window with windows that never change.

A static window is a verifier's own setting under a coordinator that leaves windows alone, so that it holds from a
session's first token on; an operator's pin would hold from the first report on, a second later. Each has a verifier of
its own, started before any is played, which stays for both of a machine's cells. All of them run on the same core and
are played from the same other one, because cores differ and load on one slows the other. Processes with the same
verifier differ by several percent even so, so each streams the same prompts as well, and a window's speed is that over
streaming at its own verifier. The verifier's `min_acceptance` is the same in all of them.

The best static window of a cell is chosen on one half of its prompts and scored on the other, both ways round, because
the best of several equal ones is the one that was lucky on the prompts by which it was chosen. Arms take turns, by
prompt or by half; at each verifier the one with drafts and the one without follow one another.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.draft_replay.client import SessionOutcome
from benchmarks.window.cell_player import CellPlayer
from benchmarks.window.cells import CellKey, speed
from benchmarks.window.context import RunContext
from benchmarks.window.testbed import RunningVerifier, VerifierMachine

Speeds = Mapping[str, Sequence[float]]
"""Configuration -> speed over streaming at its own verifier, by prompt."""
ADAPTIVE = "adaptive"
STREAMING = "streaming"


@dataclass(frozen=True)
class StaticScore:
    """Compare the adaptive window with the static ones in one cell."""

    best: tuple[str, str]
    """Best static window on the first half of the prompts, and on the second."""
    vs_best: float
    """Adaptive speed over the best static window's."""
    over: Mapping[str, float]
    """Configuration -> adaptive speed over it, median over all prompts."""


def over_streaming(streamed: Sequence[SessionOutcome], drafted: Sequence[SessionOutcome]) -> list[float]:
    """Return the speed with drafts over that without, by prompt."""
    return [speed(with_drafts) / speed(plain) for plain, with_drafts in zip(streamed, drafted, strict=True)]


def score(cell: Speeds) -> StaticScore:
    """Score a cell with the adaptive window and at least one static one, over the same two or more prompts."""
    statics = [name for name in cell if name != ADAPTIVE]
    middle = len(cell[ADAPTIVE]) // 2
    halves = (slice(0, middle), slice(middle, None))
    best = tuple(max(statics, key=lambda name: statistics.median(cell[name][half])) for half in halves)
    ratios = [_over(cell, name, half) for name, half in zip(best, reversed(halves), strict=True)]
    over = {name: round(_over(cell, name, slice(None)), 3) for name in statics}
    return StaticScore((best[0], best[1]), round(statistics.fmean(ratios), 3), over)


def _over(cell: Speeds, static: str, prompts: slice) -> float:
    return statistics.median(a / b for a, b in zip(cell[ADAPTIVE][prompts], cell[static][prompts], strict=True))


def best_single(scores: Sequence[StaticScore]) -> tuple[str, float]:
    """Return the static window that is best over all cells, and the geometric mean over cells of adaptive over it."""
    means = {
        name: math.exp(statistics.fmean(math.log(score.over[name]) for score in scores)) for name in scores[0].over
    }
    best = min(means, key=lambda name: means[name])
    return best, round(means[best], 3)


async def play_statics(context: RunContext) -> dict[str, Any]:
    """Play each of the plan's static cells with every configuration."""
    scores: dict[CellKey, StaticScore] = {}
    for machine, cells in context.plan.static_cells:
        async with contextlib.AsyncExitStack() as stack:
            sites = await _sites(context, stack, machine)
            for draft, rtt_ms in cells:
                key = CellKey(machine, draft, rtt_ms)
                scores[key] = score(await _speeds(context, sites, key))
                print(
                    f"{key}: {scores[key].vs_best:.2f} of the best of {len(sites) - 1} statics and streaming,"
                    f" chosen on one half of the prompts and scored on the other: {' | '.join(scores[key].best)}",
                    flush=True,
                )
            for name, site in sites.items():
                context.check(site, name)
    name, over = best_single(list(scores.values()))
    print(
        f"over all {len(scores)} cells: {over:.2f} of the best single one of {len(context.plan.statics)} statics"
        f" and streaming, {name}",
        flush=True,
    )
    return {
        "vs_best_single_static": over,
        "statics": [
            {"cell": str(key), "best": found.best, "vs_best": found.vs_best, "over": dict(found.over)}
            for key, found in scores.items()
        ],
    }


async def _sites(
    context: RunContext, stack: contextlib.AsyncExitStack, machine: VerifierMachine
) -> dict[str, RunningVerifier]:
    """Start a verifier for each configuration, all on the same two cores."""
    testbed, cores = context.testbed, context.core_pairs[0]
    found = {ADAPTIVE: await stack.enter_async_context(testbed.site(machine, cores))}
    for static in context.plan.statics:
        opening = testbed.static_site(machine, cores, static.directive(machine))
        found[str(static)] = await stack.enter_async_context(opening)
    return found


async def _speeds(context: RunContext, sites: Mapping[str, RunningVerifier], key: CellKey) -> dict[str, list[float]]:
    """Play a cell with every window, and return its Speeds."""
    async with contextlib.AsyncExitStack() as stack:
        players: dict[str, CellPlayer] = {}
        for name, site in sites.items():
            swarm = await stack.enter_async_context(site.swarm(context.recordings.file(key.draft)))
            players[name] = context.player(site, swarm, key.draft, counts=context.plan.static_prompts)
            await players[name].warm()
        found: dict[str, list[float]] = {name: [] for name in players}
        groups = together(players[ADAPTIVE].numbers, key.machine.sessions)
        for turn, numbers in enumerate(groups):
            for name in rotated(list(players), turn):
                # Several sessions are played in two halves, so each half arrives in half of the time.
                found[name] += over_streaming(*await players[name].pair(numbers, key.rtt_ms, turn, arrival=0.5))
    return found | {STREAMING: [1.0] * len(found[ADAPTIVE])}


def together(numbers: Sequence[int], sessions: int) -> list[Sequence[int]]:
    """Return the groups of prompts that a configuration plays before the next one's turn."""
    if sessions == 1:
        return [[number] for number in numbers]
    middle = len(numbers) // 2
    return [numbers[:middle], numbers[middle:]]


def rotated(names: Sequence[str], turn: int) -> Sequence[str]:
    """Return the names rotated, so that each is first in its turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]
