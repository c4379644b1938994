"""Compare adaptive windows with streaming, static windows and the model, by distance, draft, sessions and verifier.

A coordinator, a verifier and recorded devices (benchmarks.support.draft_replay) run behind an emulated link. Recorded
devices wait for the draft's passes and compute none, so drafting takes no CPU time from anybody; the part `live` plays
devices that compute them beside.
`streaming` runs no drafter. `adaptive` is the product as it comes: devices draft, and the coordinator decides the
windows. Both play the same prompts on the same verifier. Each part may be run alone with --only:

    cells        RTT x draft x sessions x verifier: adaptive over streaming (benchmarks.window.cells)
    statics      eight cells against windows that never change (benchmarks.window.statics)
    model        one session on the paced verifier against the streaming model's prediction (benchmarks.window.model)
    changes      the round trip changes, and the draft fails and recovers, in mid-session
                 (benchmarks.window.changing_links)
    crowd        more sessions than speculation pays for (benchmarks.window.cells_part)
    calibration  devices' estimates against what became of them; from the cells, or alone from one of them
    arms         who proposes nodes: nobody, the device, the verifier, both (benchmarks.window.arms)
    policies     the coordinator's windows, UCB-SpecStop and SpecEdge's scheme (benchmarks.window.policies)
    live         devices that compute their draft beside recorded ones (benchmarks.window.live)
    engines      our engine and vLLM, PACED alike (benchmarks.window.engines); with `--engine vllm` it is played alone
                 unless --only says otherwise

The report lists each expected figure beside the measured one; NOT MET marks one that was not reached, which is no
error.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import engine_options, harness
from benchmarks.support.engine_options import VLLM
from benchmarks.support.harness import Pair, Size
from benchmarks.window import cells_part
from benchmarks.window.acceptance_criteria import criteria, summed_up, valid
from benchmarks.window.arms import play_arms
from benchmarks.window.cells import Cell, CellKey, figures
from benchmarks.window.changing_links import play_transitions
from benchmarks.window.context import RunContext
from benchmarks.window.engines import play_engines
from benchmarks.window.live import play_live
from benchmarks.window.model import play_model
from benchmarks.window.plan import MINUTES, QUICK, REAL, SMOKE, WindowPlan
from benchmarks.window.policies import play_policies
from benchmarks.window.recording_library import RecordingLibrary
from benchmarks.window.statics import play_statics
from benchmarks.window.testbed import CorePair, WindowTestbed

PARTS = ("cells", "statics", "model", "changes", "crowd", "calibration", "arms", "policies", "live")
SHORT = ("cells", "calibration")
"""Those of a quick run, unless `--only` names others."""
ENGINES = "engines"
"""A part that needs vLLM."""
KEYS = (
    "cells",
    "worst",
    "statics",
    "vs_best_single_static",
    "paced",
    "vs_model",
    "transition",
    "crowd",
    "messages_per_s",
    "excluded_repetitive",
    "near",
    "not_measured_properly",
    "calibration_error",
    "brier_skill",
    "predicted_over_measured",
    "both_over_best",
    "both_vs_streaming",
    "no_draft_vs_streaming",
    "arms",
    "arms_several",
    "policies",
    "live",
    ENGINES,
)
"""Keys of the last line."""
CELL_KEYS = (
    "vs_streaming",
    "vs_streaming_lower95",
    "vs_streaming_upper95",
    "slowest",
    "ttft_ratio",
    "gap_ms_p50",
    "gap_ms_p99",
    "streaming_gap_ms_p50",
    "streaming_gap_ms_p99",
    "p99_gap_ratio",
    "vs_best_static",
    "k_median",
    "hit_rate",
    "bytes_up_per_token",
    "bytes_down_per_token",
)
LEAST = ("vs_streaming", "vs_streaming_lower95", "vs_streaming_upper95")
MOST = ("ttft_ratio", "p99_gap_ratio", "bytes_up_per_token", "bytes_down_per_token")
"""Figures of which the last line has the least, or the greatest, of all cells."""
TRANSITION_KEYS = ("settle_s", "settle_s_median", "vs_streaming")


def last_line(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the last line; None for parts that were not played. Cells stand by machine and draft, and
    then by round trip."""
    last = {key: result.get(key) for key in KEYS}
    cells: Sequence[Mapping[str, Any]] = result.get("cells", ())
    by_name = defaultdict[str, dict[str, Any]](dict)
    for cell in cells:
        name = f"{cell['verifier']}, {cell['sessions']}, {cell['draft']}"
        by_name[name][f"{cell['rtt_ms']:g}"] = {key: cell[key] for key in CELL_KEYS}
    last["cells"] = dict(by_name)
    if cells:
        least = {key: min(_known(cells, key), default=None) for key in LEAST}
        last["worst"] = least | {key: max(_known(cells, key), default=None) for key in MOST}
    if transition := result.get("transition"):
        last["transition"] = {key: transition[key] for key in TRANSITION_KEYS}
    return last


def _known(cells: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [cell[key] for cell in cells if cell[key] is not None]


async def run(context: RunContext, parts: Sequence[str], out: Path | None) -> dict[str, Any]:
    """Run the parts in order; return the keys of the last line and the data of the plots, as far as these parts yield
    them.

    out: an existing folder for them, written after each part.
    """
    cells: dict[CellKey, Cell] = {}
    result: dict[str, Any] = {}
    for part in [part for part in (*PARTS, ENGINES) if part in parts]:
        begun = time.monotonic()
        match part:
            case "cells":
                cells = await cells_part.grid(context)
                result["cells"] = [figures(*each) for each in cells.items()]
                result["messages_per_s"] = cells_part.messages_per_s(cells)
            case "statics":
                result |= await play_statics(context)
            case "model":
                result |= await play_model(context)
            case "changes":
                result |= await play_transitions(context)
            case "crowd":
                result |= await cells_part.crowd(context)
            case "calibration":
                result |= cells_part.calibration(cells or await cells_part.calibrated(context))
            case "arms":
                result |= await play_arms(context)
            case "policies":
                result |= await play_policies(context)
            case "live":
                result |= await play_live(context)
            case "engines":
                result |= await play_engines(context)
        print(f"--- {part}: {time.monotonic() - begun:.0f} s", flush=True)
        if out:
            (out / "window.json").write_text(json.dumps(result, indent=1))
    best = {found["cell"]: found["vs_best"] for found in result.get("statics", ())}
    for key, row in zip(cells, result.get("cells", ()), strict=True):
        row["vs_best_static"] = best.get(str(key))
    return result


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("window", __doc__)
    parser.add_argument(
        "--own", action="store_true", help="windows by the verifier's own setting instead of the coordinator's"
    )
    parser.add_argument(
        "--apart", action="store_true", help="play one paced verifier at a time, for machines on which two are too many"
    )
    parser.add_argument("--only", action="append", choices=(*PARTS, ENGINES), help="run this part alone (repeatable)")
    parser.add_argument("--out", type=Path, help="folder for the plots (PNG) and for all figures (JSON)")
    engine_options.add_options(parser)
    harness.add_texts_option(parser)
    asked = parser.parse_args(argv)
    engines = engine_options.chosen(asked)
    if ENGINES in (asked.only or ()) and VLLM not in engines:
        parser.error("--only engines needs --engine vllm")
    began = time.monotonic()
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    plan = asked.size.pick(smoke=SMOKE, quick=QUICK, full=WindowPlan())
    usual = asked.size.pick(smoke=PARTS, quick=SHORT, full=PARTS)
    parts = asked.only or (usual if VLLM not in engines else (ENGINES,))
    pair = Pair.in_folder(asked.models)
    prompts, teaching = (pair.encode(harness.prompts(split)) for split in (asked.texts, "tuning"))
    print("windows: the verifier's own setting" if asked.own else "windows: by the coordinator", flush=True)
    if asked.size is Size.FULL:
        expected = sum(minutes for part, minutes in MINUTES.items() if part in ("recordings", *parts))
        print(f"expected: about {expected:.0f} minutes on two cores, with nothing beside it", flush=True)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        recordings = RecordingLibrary(
            pair, plan, prompts, teaching, Path(scratch), keep_repetitive=asked.texts != "heldout"
        )
        context = RunContext(
            WindowTestbed(pair, controlled=not asked.own, available=engines),
            plan,
            recordings,
            CorePair.both(),
            together=not asked.apart,
        )
        async with context.testbed.site(REAL, context.core_pairs[0]) as site:
            await recordings.make(site.where, parts)
        print(f"--- recorded: {time.monotonic() - began:.0f} s", flush=True)
        result = await run(context, parts, asked.out)
    result |= {
        "excluded_repetitive": recordings.excluded,
        "near": recordings.near,
        "not_measured_properly": context.invalid,
    }
    if result.get("cells"):
        print(summed_up(result["cells"]))
    if set(parts) == set(PARTS) and asked.size is Size.FULL:
        result["minutes"] = round((time.monotonic() - began) / 60.0, 1)
    print(f"--- all: {time.monotonic() - began:.0f} s", flush=True)
    if asked.out:
        _keep(result, asked.out)
    harness.finish(last_line(result), [*criteria(result), valid(context.invalid)], asked.size)


def _keep(result: Mapping[str, Any], folder: Path) -> None:
    """Write all figures as JSON and draw their plots."""
    from benchmarks.window.plots import draw

    (folder / "window.json").write_text(json.dumps(result, indent=1))
    for picture in draw(result, folder):
        print(f"wrote {picture}")


if __name__ == "__main__":
    asyncio.run(main())
