"""Adaptive windows against plain streaming, static windows and the model: by distance, draft, sessions and verifier.

A coordinator, a verifier and recorded devices (benchmarks.swarm) behind an emulated link. `streaming` runs no drafter.
`adaptive` is the product as it comes: devices draft, the coordinator steers. Both play the same prompts on the same
verifier. The parts, each of which may be run alone with --only:

    cells        RTT x draft x sessions x verifier: adaptive over streaming (benchmarks.window_cells)
    statics      eight cells against windows that never change (window_statics)
    model        one session on the paced verifier against what the streaming model predicts (window_model)
    turns        the round trip turns, and the draft fails and recovers, in mid-session (window_turns)
    crowd        more sessions than speculation pays for
    calibration  devices' estimates against what became of them; from the cells, or alone from one of them

Figures that are wanted stand beside what was got; SHORT says that one was not reached, which is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import harness, window_turns
from benchmarks.harness import Pair
from benchmarks.reliability import reliability
from benchmarks.replay import Job, Outcome
from benchmarks.swarm import Swarm
from benchmarks.tape import Call, Tape
from benchmarks.window_cells import (
    Cell,
    CellPlayer,
    Key,
    Sight,
    figures,
    interval,
    line,
    merged,
    predicted_over_measured,
    watched,
)
from benchmarks.window_model import against
from benchmarks.window_plan import (
    COLLAPSE,
    COLLAPSE_RTT_MS,
    CROWD,
    CROWD_RTT_MS,
    PACED,
    PLAIN_TURN_TOKENS,
    QUICK,
    REAL,
    TOKENS,
    TURN_TOKENS,
    TURNING,
    TURNS,
    Plan,
    side_by_side,
)
from benchmarks.window_stage import Lane, Machine, Site, Stage, play
from benchmarks.window_statics import ADAPTIVE, STREAMING, Score, best_single, score, speeds
from benchmarks.window_tapes import (
    LONG,
    calls,
    long_prompts,
    match_rate,
    nearest,
    options,
    screened,
    taped,
    verdicts,
)
from benchmarks.window_turns import Stretch, Transition
from benchmarks.window_wanted import wanted

PARTS = ("cells", "statics", "model", "turns", "crowd", "calibration")
CALIBRATED = Key(PACED, "good", 50.0)
"""The cell that calibration plays where it runs alone."""
BINS = 10


class Bench:
    """The parts, and what they found."""

    def __init__(self, stage: Stage, plan: Plan, scratch: Path, prompts: Mapping[str, Sequence[int]]) -> None:
        """prompts: held out, by name; as many as the plan may want."""
        self._stage = stage
        self._plan = plan
        self._scratch = scratch
        self._prompts = prompts
        self._lanes = Lane.both()
        self._drafts = {"good": stage.pair.draft, "narrow": stage.pair.narrow}
        self._tapes: dict[str, Tape] = {}
        self._cells: dict[Key, Cell] = {}
        self.result: dict[str, Any] = {"cells": []}
        """Keys of the last line, and what the plots need."""

    # --- recordings

    async def record(self, parts: Sequence[str]) -> None:
        """All that the parts will play, by one verifier that is not paced."""
        plan = self._plan
        some = dict(list(self._prompts.items())[: plan.prompts])
        long = {f"long {i}": p for i, p in enumerate(long_prompts(list(self._prompts.values()), plan.long, LONG))}
        async with self._stage.site(REAL, self._lanes[0]) as site:
            said, ends = await calls(site.where, some, options(max(TOKENS.values())))
            more, _ = await calls(site.where, long, options(16), 1)
            turning, near = [], []
            if "turns" in parts:
                turning, _ = await calls(site.where, dict(list(some.items())[: plan.turns]), options(TURN_TOKENS))
            if "model" in parts:
                near = [
                    call
                    for temperature in (0.0, 0.8)
                    for call in (await calls(site.where, self._prompts, options(TOKENS[PACED], temperature), 16))[0]
                ]
        for draft in plan.drafts:
            await self._tape(draft, draft, [*said, *more], ends)
        if turning:
            await self._tape("turns", "good", turning, ends)
        if near:
            await self._tape("near", "good", self._near(near, ends), ends)

    def _near(self, candidates: Sequence[Call], ends: Sequence[int]) -> list[Call]:
        """Those whose match is near 0.8, chosen by the draft's answers alone."""
        shares = screened(self._stage.pair, candidates, ends)
        taken, inside = nearest(shares, self._plan.near)
        print(
            f"match near 0.8: {inside} of {len(shares)} recordings lie in 0.75 to 0.85;"
            f" {len(taken)} are played, {harness.spread([shares[i] for i in taken])}",
            flush=True,
        )
        return [candidates[i] for i in taken]

    async def _tape(self, name: str, draft: str, said: Sequence[Call], ends: Sequence[int]) -> None:
        tape = await taped(self._stage.pair, self._drafts[draft], said, ends, self._file(name))
        self._tapes[name] = tape
        shares = [match_rate(verdicts(recording)) for recording in tape.recordings]
        print(
            f"tape {name}: {len(shares)} recordings, match {harness.spread(shares)},"
            f" {1e3 * tape.decodes[0][1]:.2f} ms a decode",
            flush=True,
        )

    def _file(self, name: str) -> Path:
        return self._scratch / f"{name}.json"

    # --- cells

    async def cells(self) -> None:
        """Verifiers start two at a time, and are played so where both are paced for one session."""
        for group in self._plan.sites():
            await self._play_cells([keys for keys in group if keys])
        self.result["cells"] = [self._told(key, cell) for key, cell in self._cells.items()]
        rates = [outcome for cell in self._cells.values() for outcome in cell.played]
        appends, seconds = (sum(getattr(outcome, name) for outcome in rates) for name in ("appends", "seconds"))
        self.result["messages_per_s"] = round(appends / seconds, 1)

    async def _play_cells(self, group: Sequence[Sequence[Key]]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            sites = await asyncio.gather(
                *(
                    stack.enter_async_context(self._stage.site(keys[0].machine, lane, self._drafts[keys[0].draft]))
                    for keys, lane in zip(group, self._lanes, strict=False)
                )
            )
            await _each(
                [
                    lambda site=site, keys=keys: self._play_site(site, keys)
                    for site, keys in zip(sites, group, strict=True)
                ],
                at_once=side_by_side([site.machine for site in sites]),
            )

    async def _play_site(self, site: Site, keys: Sequence[Key]) -> None:
        """Long prompts come last: a paced verifier needs longer for them than its pace says."""
        found = {key: Cell() for key in keys}
        draft = keys[0].draft
        async with site.swarm(self._file(draft)) as swarm:
            player = self._player(site, swarm, draft, self._plan.rounds)
            await player.warm()
            for key, cell in found.items():
                await player.steady(key.rtt_ms, cell)
            overran = await site.check()
            for key, cell in found.items():
                await player.first_tokens(key.rtt_ms, cell)
        if site.machine.pass_ms:
            print(f"{site.machine}, {draft}: {overran:.2%} of the passes overran", flush=True)
        for key, cell in found.items():
            print(line(key, figures(key, cell)), flush=True)
        self._cells |= found

    def _player(self, site: Site, swarm: Swarm, draft: str, rounds: int) -> CellPlayer:
        prompts = len(self._tapes[draft].recordings) - self._plan.long
        long = range(prompts, prompts + self._plan.long)
        machine = site.machine
        count = self._plan.singles if machine.sessions == 1 else max(prompts, machine.sessions)
        numbers = [i % prompts for i in range(count)]
        return CellPlayer(site, swarm, numbers, long, tokens=TOKENS[machine], rounds=rounds)

    def _told(self, key: Key, cell: Cell) -> dict[str, Any]:
        return figures(key, cell) | {"vs_best_static": None}

    # --- statics

    async def statics(self) -> None:
        """The best static of each cell goes into the cell's figures too."""
        scores: dict[Key, Score] = {}
        for machine, cells in self._plan.static_cells:
            async with contextlib.AsyncExitStack() as stack:
                sites = await self._static_sites(stack, machine)
                for draft, rtt_ms in cells:
                    key = Key(machine, draft, rtt_ms)
                    scores[key] = score(speeds(await self._arms(sites, key)))
                    print(f"{key}: {scores[key].vs_best:.2f} of the best static, {scores[key].best}", flush=True)
        for cell in self.result["cells"]:
            for key, found in scores.items():
                if (key.draft, key.rtt_ms, key.machine.sessions, key.verifier) == tuple(
                    cell[name] for name in ("draft", "rtt_ms", "sessions", "verifier")
                ):
                    cell["vs_best_static"] = found.vs_best
        self.result["statics"] = [
            {"cell": str(key), "best": found.best, "vs_best": found.vs_best, "over": dict(found.over)}
            for key, found in scores.items()
        ]
        name, over = best_single(list(scores.values()))
        self.result["vs_best_single_static"] = over
        print(f"over all of them: {over:.2f} of the best single static, {name}", flush=True)

    async def _static_sites(self, stack: contextlib.AsyncExitStack, machine: Machine) -> dict[str, Site]:
        """By arm, as many on each core."""
        found: dict[str, Site] = {}
        openers: dict[str, Callable[[Lane], contextlib.AbstractAsyncContextManager[Site]]] = {
            ADAPTIVE: lambda lane: self._stage.site(machine, lane)
        }
        for static in self._plan.statics:
            openers[str(static)] = lambda lane, s=static: self._stage.static_site(machine, lane, s.directive)
        names = list(openers)
        for i in range(0, len(names), 2):
            entering = (
                stack.enter_async_context(openers[name](lane))
                for name, lane in zip(names[i : i + 2], self._lanes, strict=False)
            )
            found |= dict(zip(names[i : i + 2], await asyncio.gather(*entering), strict=True))
        return found

    async def _arms(self, sites: Mapping[str, Site], key: Key) -> dict[str, list[Outcome]]:
        """Streaming is played where the adaptive arm is."""
        arms: dict[str, list[Outcome]] = {}

        async def lane(names: Sequence[str]) -> None:
            for name in names:
                async with sites[name].swarm(self._file(key.draft)) as swarm:
                    player = self._player(sites[name], swarm, key.draft, 1)
                    await player.warm()
                    arms[name] = await player.arm(key.rtt_ms, drafted=True)
                    if name == ADAPTIVE:
                        arms[STREAMING] = await player.arm(key.rtt_ms, drafted=False)

        by_lane = [[name for name, site in sites.items() if site.lane == lane] for lane in self._lanes]
        await _each([lambda names=names: lane(names) for names in by_lane], at_once=side_by_side([key.machine]))
        return arms

    # --- the model

    async def model(self) -> None:
        rtts = self._plan.model_rtts_ms
        halves = [half for half in (rtts[0::2], rtts[1::2]) if half]
        tape = self._tapes["near"]
        said = [verdicts(recording) for recording in tape.recordings]
        cells: dict[float, Cell] = {}

        async def lane(lane: Lane, rtts_ms: Sequence[float]) -> None:
            async with self._stage.site(PACED, lane) as site, site.swarm(self._file("near")) as swarm:
                player = CellPlayer(site, swarm, range(len(said)), (), tokens=TOKENS[PACED], rounds=1)
                await player.warm()
                for rtt_ms in rtts_ms:
                    cells[rtt_ms] = Cell()
                    await player.steady(rtt_ms, cells[rtt_ms])
                await site.check()

        await asyncio.gather(*(lane(*each) for each in zip(self._lanes, halves, strict=False)))
        found = [against(Key(PACED, "near", rtt), cells[rtt], said, tape.decodes[0][1]) for rtt in rtts]
        for each in found:
            print(
                f"{PACED!s:<34}{each.rtt_ms:>5.0f} ms, match near 0.8: {each.vs_streaming:.2f}x after the first token;"
                f" the model says {each.predicted:.2f}x; {each.vs_model:.2f} of its speed",
                flush=True,
            )
        self.result["paced"] = {f"{rtt:g}": round(interval(cells[rtt].ratios)[0], 3) for rtt in rtts}
        self.result["vs_model"] = min(each.vs_model for each in found)
        self.result["against"] = [asdict(each) for each in found]

    # --- turns

    async def turns(self) -> None:
        """Both lines at once, a core each."""
        found: list[Transition] = []
        series: list[dict[str, Any]] = []

        async def turning(lane: Lane) -> None:
            async with self._stage.site(TURNING, lane) as site, site.swarm(self._file("turns"), TURNS) as swarm:
                await self._turns(site, swarm, "RTT 5, 300, 5 ms", 5.0, (0, 0), found, series)

        async def collapsing(lane: Lane) -> None:
            async with self._stage.site(TURNING, lane) as site, site.swarm(self._file("turns")) as swarm:
                name = f"draft fails and recovers, RTT {COLLAPSE_RTT_MS:g} ms"
                await self._turns(site, swarm, name, COLLAPSE_RTT_MS, COLLAPSE, found, series)

        await asyncio.gather(turning(self._lanes[0]), collapsing(self._lanes[1]))
        summary = window_turns.summary(found)
        for each in summary.values():
            print(
                f"{TURNING!s:<34}{each.name}: {each.vs_streaming:.2f} of streaming in the"
                f" {window_turns.AFTER_S:g} s after, settled in {each.settle_s:.1f} s, at most {each.changes} changes",
                flush=True,
            )
        self.result["transition"] = {
            "settle_s": max(each.settle_s for each in summary.values()),
            "vs_streaming": min(each.vs_streaming for each in summary.values()),
            "changes": max(each.changes for each in summary.values()),
        }
        self.result["stretches"] = [asdict(each) for each in found]
        self.result["series"] = sorted(series, key=lambda each: str(each["name"]))

    async def _turns(
        self,
        site: Site,
        swarm: Swarm,
        name: str,
        rtt_ms: float,
        spoiled: tuple[int, int],
        found: list[Transition],
        series: list[dict[str, Any]],
    ) -> None:
        await play(swarm, [Job(0, True, "cancel", 8, rtt_ms=rtt_ms)], 1)
        sights: list[Sight] = []
        for number in range(len(self._tapes["turns"].recordings)):
            plain = Job(number, False, "cancel", PLAIN_TURN_TOKENS, rtt_ms=rtt_ms)
            (streamed,) = await play(swarm, [plain], 1)
            async with watched(site, sights, 0.1):
                (outcome,) = await play(swarm, [Job(number, rtt_ms=rtt_ms, spoiled=spoiled)], 1)
            if any(spoiled):
                stretches = window_turns.stretches_of_draft(outcome, spoiled)
            else:
                stretches = window_turns.stretches_of_line(outcome, TURNS)
            found += [window_turns.transition(each, outcome, streamed, sights) for each in stretches]
            if number == 0:
                series.append(_series(name, outcome, streamed, sights, stretches))
        await site.check()

    # --- a crowd

    async def crowd(self) -> None:
        key, cell = Key(CROWD, "good", CROWD_RTT_MS), Cell()
        async with (
            self._stage.site(CROWD, self._lanes[0]) as site,
            site.swarm(self._file("good")) as swarm,
        ):
            player = self._player(site, swarm, "good", 1)
            await player.warm()
            await player.steady(CROWD_RTT_MS, cell)
            await site.check()
        found = figures(key, cell)
        print(line(key, found), flush=True)
        self.result["crowd"] = {name: found[name] for name in ("slowest", "vs_streaming", "k_median")}

    # --- calibration

    async def calibration(self) -> None:
        if not self._cells:
            await self._play_cells([[CALIBRATED]])
        cells = merged(self._cells.values())
        predicted = [value for outcome in cells.played for value in outcome.predicted]
        happened = [value for outcome in cells.played for value in outcome.happened]
        judged = reliability(predicted, happened, BINS)
        ratios = [ratio for cell in self._cells.values() for ratio in predicted_over_measured(cell)]
        self.result |= {
            "calibration_error": round(judged.error, 4),
            "brier_skill": round(judged.skill, 4),
            "curve": judged.curve,
            "predicted_over_measured": round(statistics.median(ratios), 3) if ratios else None,
        }
        print(
            f"{len(predicted)} estimates: error {judged.error:.3f}, skill {judged.skill:.3f};"
            f" tokens a step, predicted over measured: {harness.spread(ratios) if ratios else 'nothing decided'},"
            f" {len(ratios)} sessions",
            flush=True,
        )


async def _each(playing: Sequence[Callable[[], Awaitable[None]]], *, at_once: bool) -> None:
    """All of them together, or one after the other."""
    if at_once:
        await asyncio.gather(*(play() for play in playing))
    else:
        for one in playing:
            await one()


def _series(
    name: str, outcome: Outcome, streamed: Outcome, sights: Sequence[Sight], stretches: Sequence[Stretch]
) -> dict[str, Any]:
    """One session over time, for the plot."""
    begun = window_turns.began_s(outcome)
    seen = [sight for sight in sights if sight.session_id == outcome.session_id]
    return {
        "name": name,
        "adaptive": list(window_turns.over_time(outcome)),
        "streaming": list(window_turns.over_time(streamed)),
        "k": [(sight.at_s - begun, sight.k) for sight in seen],
        "depth": [(sight.at_s - begun, sight.depth) for sight in seen],
        "changes": [(stretch.since_s - begun, stretch.name) for stretch in stretches],
    }


KEYS = (
    "cells",
    "vs_best_single_static",
    "paced",
    "vs_model",
    "transition",
    "messages_per_s",
    "calibration_error",
    "brier_skill",
    "predicted_over_measured",
)
"""Of the last line."""


async def main() -> None:
    parser = harness.arguments("window", __doc__)
    parser.add_argument("--own", action="store_true", help="devices draft by their verifier's own setting")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part alone; may be given more than once")
    parser.add_argument("--out", type=Path, help="folder for the plots (PNG) and for all figures (JSON)")
    asked = parser.parse_args()
    plan = QUICK if asked.quick else Plan()
    parts = asked.only or PARTS
    pair = Pair.in_folder(asked.models)
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = {p.id: tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")}
    print("windows: the verifier's own setting" if asked.own else "windows: by the coordinator", flush=True)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        bench = Bench(Stage(pair, steered=not asked.own), plan, Path(scratch), prompts)
        began = time.monotonic()
        await bench.record(parts)
        print(f"--- recorded in {time.monotonic() - began:.0f} s", flush=True)
        for part in [part for part in PARTS if part in parts]:
            begun = time.monotonic()
            await getattr(bench, part)()
            print(f"--- {part}: {time.monotonic() - begun:.0f} s", flush=True)
    for each in wanted(bench.result):
        print(each)
    print(f"--- all: {time.monotonic() - began:.0f} s", flush=True)
    if asked.out:
        _keep(bench.result, asked.out)
    harness.finish({key: bench.result.get(key) for key in KEYS})


def _keep(result: Mapping[str, Any], folder: Path) -> None:
    """All figures, and their pictures."""
    from benchmarks.window_plots import draw  # of the dev extra, which figures alone do not need

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "window.json").write_text(json.dumps(result, indent=1))
    for picture in draw(result, folder):
        print(f"wrote {picture}")


if __name__ == "__main__":
    asyncio.run(main())
