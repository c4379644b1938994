"""Run the distillation loop on the whole system: devices, verifier, coordinator, Redis, `outrider-distill`.

Eight devices draft with the narrow draft and ask for code, then for sums. The loop notices, trains, gates, publishes;
the canary decides; live sessions swap. Then a worse draft is published on purpose, and devices are offered bad
releases. Trainer, loop, coordinator and Redis are killed on the way. The questions that devices ask
(benchmarks.support.questions) are not among the prompts of the measurements (benchmarks/prompts). The tenant has agreed
to its prompts being kept: a draft learns from answers alone, and reads prompts as context. A run takes under 25 minutes
on two cores; `--quick` takes under 5, which is too little traffic to promise how much is learnt.

The exit status is 1 if a promise is broken or the run is invalid.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.distill import gain, identity, kills, learning, safety
from benchmarks.distill.answer import DeviceAnswer
from benchmarks.distill.bad_releases import BAD_RELEASES
from benchmarks.distill.fleet import DeviceFleet, until
from benchmarks.distill.gain import DraftGain, HeldOutText
from benchmarks.distill.run_log import RunLog
from benchmarks.distill.size import FULL, HANG_S, QUICK, SMOKE, DistillSize
from benchmarks.distill.system import DistillSystem
from benchmarks.support import old_harness as harness
from benchmarks.support.old_harness import Criterion, Pair
from edge_agent import AsyncClient
from outrider.artifacts.store import file_digest
from outrider.core.errors import OutriderError, Unavailable

GAP_CLOSED, CODE_LOSS = 0.8, 0.05
"""Least share of the gap that should be closed, and greatest loss on code."""


@dataclass
class DistillResult:
    """Hold the last line of the output, with the figures measured so far."""

    tokens_per_step: dict[str, float | None] = field(
        default_factory=lambda: {"before": None, "after": None, "reference": None}
    )
    by_texts: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same by kind of prompt, and by kind and group: greedy, sampled, and those that repeat themselves."""
    gap_closed: float | None = None
    gap_closed_95: list[float] | None = None
    code_loss: float | None = None
    swap_ms_p50: float | None = None
    swap_ms_p99: float | None = None
    tokens_lost: int | None = None
    rolled_back: bool | None = None
    refused: list[str] = field(default_factory=list)
    minutes: float = 0.0
    settings: str = ""
    """What differs from a cluster's own settings."""


@dataclass
class PlotData:
    """Hold the data of the plots."""

    answers: list[DeviceAnswer] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


async def run(
    system: DistillSystem, scale: DistillSize, run_log: RunLog, result: DistillResult, kept: PlotData
) -> None:
    """Run all parts in the order of time. `result` holds the figures measured so far, even if this raises."""
    cache, pair = system.folder / "devices", system.pair
    devices = DeviceFleet.of(system.address, cache, system.public_key, scale.request_tokens, system.logs)
    kept.names[file_digest(pair.narrow)] = "narrow draft"
    async with AsyncClient(coordinator=system.address, draft=None, timeout=None) as plain, devices as fleet:
        kept.answers = fleet.answers
        stable = await learn(system, fleet, scale, run_log, kept)
        await fleet.quiet()
        # Not before: this is recorded too, and what is measured with must not be learnt from.
        texts = await gain.written(plain, pair, scale.heldout, scale.heldout_tokens)
        judge_gain(await asyncio.to_thread(measured, system, stable, texts, run_log, result), scale, run_log, result)
        bad = await asyncio.to_thread(safety.prepare, system, scale, texts, stable)
        kept.names[file_digest(bad.file)] = "worse draft"
        fleet.order("arithmetic")
        await kills.kill_redis(system, fleet, run_log)
        result.rolled_back = await safety.worse(system, fleet, scale, run_log, bad, stable)
        await fleet.quiet()
        result.swap_ms_p50, result.swap_ms_p99 = (round(ms, 1) for ms in safety.swaps(fleet.answers, run_log))
        again = identity.chosen(fleet.answers, scale.compared)
        found = await identity.compare(plain, again, pair)
        result.tokens_lost = found.lost
        safety.judge_outputs(found, kills.unexplained(fleet.answers, run_log.outages), run_log)
        refusals = await safety.refusals(system, system.artifacts / f"{stable}.gguf", run_log)
        result.refused = sorted(refusal.wanted for refusal in refusals if refusal.held)


async def smoke(system: DistillSystem, scale: DistillSize, run_log: RunLog, result: DistillResult) -> None:
    """Compare a few answers with plain streaming and offer one bad release; nothing is learnt."""
    devices = DeviceFleet.of(
        *(system.address, system.folder / "devices", system.public_key, scale.request_tokens, system.logs),
        devices=2,
        processes=1,
    )
    async with AsyncClient(coordinator=system.address, draft=None, timeout=None) as plain, devices as fleet:
        fleet.order("code")
        await until(lambda: len(fleet.answers) >= scale.compared, HANG_S, "devices get answers")
        await fleet.quiet()
        found = await identity.compare(plain, identity.chosen(fleet.answers, scale.compared), system.pair)
    result.tokens_lost = found.lost
    measured = f"{found.lost} of {found.tokens} in {found.requests} requests"
    run_log.check("tokens that are not those of plain streaming", "0", measured, found.identical and found.tokens > 0)
    # Not of the draft that devices have: they would have no need to download it.
    refusals = await safety.refusals(system, system.pair.draft, run_log, BAD_RELEASES[:1])
    result.refused = [refusal.wanted for refusal in refusals if refusal.held]


async def learn(system: DistillSystem, fleet: DeviceFleet, scale: DistillSize, run_log: RunLog, kept: PlotData) -> str:
    """Run part 1, in which trainer and coordinator are killed; return the digest of the stable release."""
    number = await learning.turn(system, fleet, scale, run_log)
    fleet.order("arithmetic", scale.pause_s)
    await learning.train(system, number, scale, run_log)
    kept.curve = learning.curve(system.run_folder(number))
    release = await learning.published(system, scale, run_log)
    kept.names[release] = "learnt draft"
    fleet.order("arithmetic")
    await kills.kill_coordinator(system, fleet, run_log)
    last = await learning.decided(system, scale, run_log)
    run_log.check("the canary", "the learnt draft is stable", last.result, last.result == "stable")
    if last.result != "stable":
        raise Unavailable("there is no learnt draft to go on with")
    await learning.adopted(fleet, release, HANG_S, run_log)
    return release


def measured(
    system: DistillSystem, release: str, texts: Sequence[HeldOutText], run_log: RunLog, result: DistillResult
) -> DraftGain:
    """Measure the draft before and after training, and the reference, in the files that devices load."""
    after, before, prompts = gain.measured((system.artifacts / f"{release}.gguf", system.pair.narrow), texts)
    reference, *_ = gain.measured((system.pair.draft, system.pair.narrow), texts)
    result.gap_closed_95 = [round(end, 3) for end in gain.interval(before, after, reference, prompts)]
    low, high = result.gap_closed_95
    run_log.log(f"of the gap {low:.0%} to {high:.0%} is closed (95%, bootstrap over the prompts)")
    return DraftGain(gain.per_step(before), gain.per_step(after), gain.per_step(reference))


def judge_gain(found: DraftGain, scale: DistillSize, run_log: RunLog, result: DistillResult) -> None:
    """Compare the figures of part 1 with those expected."""
    for name, values in (("before", found.before), ("after", found.after), ("reference", found.reference)):
        figures = ", ".join(f"{kind} {values[kind]:.3f}" for kind in gain.KINDS)
        run_log.log(f"tokens per step with the tree, held-out prompts, {name}: {figures}")
        result.tokens_per_step[name] = round(values["arithmetic"], 3)
        result.by_texts[name] = {group: round(value, 3) for group, value in sorted(values.items())}
    result.gap_closed, result.code_loss = round(found.gap_closed, 3), round(found.code_loss, 3)
    run_log.check(
        "the gap", f"at least {gain.LEAST_GAP} tokens per step, or nothing is shown", f"{found.gap:.3f}", found.valid
    )
    if not scale.promised:
        run_log.log(
            f"of the gap {found.gap_closed:.0%} is closed, on code {found.code_loss:.1%} lost; nothing promised"
        )
        return
    held = found.gap_closed >= GAP_CLOSED
    run_log.check("gap closed", f"at least {GAP_CLOSED:.0%}", f"{found.gap_closed:.1%}", held)
    run_log.check("lost on code", f"at most {CODE_LOSS:.0%}", f"{found.code_loss:.1%}", found.code_loss <= CODE_LOSS)


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("distill", __doc__)
    parser.add_argument("--out", type=Path, help="folder for the plots (PNG)")
    asked = parser.parse_args(argv)
    scale = asked.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    run_log, result, kept = RunLog(), DistillResult(), PlotData()
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        system = DistillSystem(Pair.in_folder(asked.models), scale, Path(scratch))
        try:
            async with system:
                run_log.log("the system runs: Redis, coordinator, verifier, the loop")
                run_log.log(f"not the defaults: {system.unusual}")
                if scale.learns:
                    await run(system, scale, run_log, result, kept)
                else:
                    await smoke(system, scale, run_log, result)
        except (OutriderError, TimeoutError, RuntimeError) as error:
            run_log.check("the run", "comes to its end", f"{type(error).__name__}: {error}", False)
            system.show_logs()
    if asked.out:
        draw(asked.out, run_log, kept)
    result.minutes = round(run_log.minutes, 1)
    result.settings = system.unusual
    time_taken = Criterion.bound("minutes", result.minutes, at_most=scale.minutes, strict=True, enforced_from=None)
    harness.finish(vars(result), [*run_log.checks, time_taken], asked.size)


def draw(folder: Path, run_log: RunLog, kept: PlotData) -> None:
    """Draw the plots for which there are data."""
    from benchmarks.distill import plots

    folder.mkdir(parents=True, exist_ok=True)
    made = [
        plots.acceptance(kept.answers, run_log.events, kept.names, run_log.begun, folder / "distill_acceptance.png")
    ]
    if kept.curve:
        made.append(plots.training(kept.curve, folder / "distill_training.png"))
    for path in made:
        print(f"wrote {path}")


if __name__ == "__main__":
    asyncio.run(main())
