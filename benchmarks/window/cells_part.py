"""Play the parts that consist of whole cells: the grid, a crowd, and the calibration of predictions."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.support import harness
from benchmarks.support.reliability import Reliability, reliability
from benchmarks.window.cells import Cell, CellKey, figures, line, merged, predicted_over_measured
from benchmarks.window.context import RunContext
from benchmarks.window.plan import CROWD_RTT_MS, PACED
from benchmarks.window.testbed import RunningVerifier

CALIBRATED = CellKey(PACED, "good", 50.0)
"""The cell that calibration plays if it runs alone."""
BINS = 10
CROWD_KEYS = (
    "slowest",
    "vs_streaming",
    "vs_streaming_lower95",
    "vs_streaming_upper95",
    "k_median",
    "min_acceptance",
    "predicted",
)


async def grid(context: RunContext) -> dict[CellKey, Cell]:
    """Play every cell. Verifiers start two at a time."""
    found: dict[CellKey, Cell] = {}
    for group in context.plan.sites():
        found |= await _group(context, group)
    return found


async def calibrated(context: RunContext) -> dict[CellKey, Cell]:
    """Play one cell for the calibration if the grid is not played."""
    return await _group(context, [[CALIBRATED]])


async def _group(context: RunContext, group: Sequence[Sequence[CellKey]]) -> dict[CellKey, Cell]:
    """Play the cells of one or two verifiers, each with its draft and machine."""
    found: dict[CellKey, Cell] = {}
    async with contextlib.AsyncExitStack() as stack:
        starting = (
            stack.enter_async_context(
                context.testbed.site(keys[0].machine, cores, context.recordings.drafts[keys[0].draft])
            )
            for keys, cores in zip(group, context.core_pairs, strict=False)
        )
        sites = await asyncio.gather(*starting)
        playing = [partial(_site, context, site, keys, found) for site, keys in zip(sites, group, strict=True)]
        await context.each(playing, [site.machine for site in sites])
    return found


async def _site(
    context: RunContext, site: RunningVerifier, keys: Sequence[CellKey], found: dict[CellKey, Cell]
) -> None:
    """Play a verifier's cells. Long prompts come last: a paced verifier needs longer for them than its pace says."""
    cells = {key: Cell() for key in keys}
    draft = keys[0].draft
    async with site.swarm(context.recordings.file(draft)) as swarm:
        player = context.player(site, swarm, draft, context.plan.rounds_of(site.machine), probed=True)
        await player.warm()
        begun = time.monotonic()
        for key, cell in cells.items():
            await player.steady(key.rtt_ms, cell)
        steady_s = time.monotonic() - begun
        context.check(site, f"{draft} draft")
        for key, cell in cells.items():
            if context.plan.has_long(key):
                await player.first_tokens(key.rtt_ms, cell)
    long_s = time.monotonic() - begun - steady_s
    print(f"--- {site.machine}, {draft}: {steady_s:.0f} s, and {long_s:.0f} s for long prompts", flush=True)
    for key, cell in cells.items():
        print(line(key, figures(key, cell)), flush=True)
    found |= cells


async def crowd(context: RunContext) -> dict[str, Any]:
    """Play more sessions than speculation pays for."""
    machine = context.plan.crowd
    key, cell = CellKey(machine, "good", CROWD_RTT_MS), Cell()
    async with (
        context.testbed.site(machine, context.core_pairs[0]) as site,
        site.swarm(context.recordings.file("good")) as swarm,
    ):
        player = context.player(site, swarm, "good")
        await player.warm()
        await player.steady(CROWD_RTT_MS, cell)
        context.check(site)
    found = figures(key, cell)
    print(line(key, found), flush=True)
    shown = {name: "-" if found[name] is None else found[name] for name in ("min_acceptance", "k_median", "predicted")}
    print(
        f"a crowd, {machine}: min_acceptance {shown['min_acceptance']}, k {shown['k_median']},"
        f" predicted {shown['predicted']}x by the coordinator; the slowest {found['slowest']:.2f}x",
        flush=True,
    )
    return {"crowd": {name: found[name] for name in CROWD_KEYS} | {"machine": str(machine)}}


def calibration(cells: Mapping[CellKey, Cell]) -> dict[str, Any]:
    """Compare devices' estimates of acceptance, and the coordinator's of tokens per step, with the outcomes."""
    judged = _judged(cells.values(), "all drafts")
    drafts = dict.fromkeys(key.draft for key in cells)
    by_draft = {d: _judged([cell for key, cell in cells.items() if key.draft == d], f"{d} draft") for d in drafts}
    ratios = [ratio for cell in cells.values() for ratio in predicted_over_measured(cell)]
    print(
        f"tokens a step, predicted over measured: {harness.spread(ratios) if ratios else 'nothing decided'},"
        f" {len(ratios)} sessions",
        flush=True,
    )
    return {
        "calibration_error": round(judged.error, 4),
        "brier_skill": round(judged.skill, 4),
        "calibration_by_draft": {draft: (round(j.error, 4), round(j.skill, 4)) for draft, j in by_draft.items()},
        "curve": judged.curve,
        "predicted_over_measured": round(statistics.median(ratios), 3) if ratios else None,
    }


def _judged(cells: Iterable[Cell], name: str) -> Reliability:
    played = merged(cells).played
    predicted = [value for outcome in played for value in outcome.predicted]
    happened = [value for outcome in played for value in outcome.happened]
    judged = reliability(predicted, happened, BINS)
    print(f"{name}, {len(predicted)} estimates: error {judged.error:.3f}, skill {judged.skill:.3f}", flush=True)
    return judged


def messages_per_s(cells: Mapping[CellKey, Cell]) -> float:
    """Return and print the Appends per second of a session that drafts."""
    played = merged(cells.values()).played
    found = round(sum(o.appends for o in played) / sum(o.seconds for o in played), 1)
    print(f"messages: {found} Appends up a second, of a session that drafts, over all cells", flush=True)
    return found
