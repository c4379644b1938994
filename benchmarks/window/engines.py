"""Play a PACED session on our engine and on vLLM, with the same texts and drafts, side by side.

A step takes as long on both, so the two differ by what a step commits: our engine verifies token trees, vLLM chains.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from functools import partial
from typing import Any

from benchmarks.support.draft_replay.client import SessionOutcome
from benchmarks.support.draft_replay.swarm import repeated
from benchmarks.support.engine_options import TORCH, VLLM
from benchmarks.window.cell_player import CellPlayer
from benchmarks.window.cells import Cell, CellKey, figures, interval, line, over
from benchmarks.window.context import RunContext
from benchmarks.window.plan import PACED
from benchmarks.window.testbed import RunningVerifier

DRAFT = "good"
RTTS_MS = (1.0, 50.0)
KEYS = ("vs_streaming", "tokens_per_step", "k_median", "hit_rate", "bytes_up_per_token")


async def play_engines(context: RunContext) -> dict[str, Any]:
    """Play the same prompts on both engines, by streaming and with adaptive windows.

    Raises RuntimeError if vLLM repeats no recorded output.
    """
    testbed, draft = context.testbed, context.recordings.drafts[DRAFT]
    recordings = context.recordings.recorded(DRAFT).recordings[: context.recordings.prompts(DRAFT)]
    cells = {(engine, rtt_ms): Cell() for engine in (TORCH, VLLM) for rtt_ms in RTTS_MS}
    async with contextlib.AsyncExitStack() as stack:
        starting = (
            stack.enter_async_context(testbed.site(PACED, cores, draft, engine))
            for engine, cores in zip((TORCH, VLLM), context.core_pairs, strict=True)
        )
        ours, theirs = await asyncio.gather(*starting)
        same = await repeated(theirs.where, recordings)
        print(f"vLLM repeats {len(same)} of {len(recordings)} recorded outputs; the others are left out", flush=True)
        if not same:
            raise RuntimeError("vLLM repeats no output of our engine: run benchmarks.lossless --vllm-python")
        numbers = same[: context.plan.singles]

        async def play(engine: str, site: RunningVerifier) -> None:
            async with site.swarm(context.recordings.file(DRAFT)) as swarm:
                player = CellPlayer(site, swarm, numbers, (), tokens=context.plan.tokens_of(PACED))
                await player.warm()
                if site.counts is not None:
                    site.counts.begin()  # comparing the outputs was not paced for
                for rtt_ms in RTTS_MS:
                    await player.steady(rtt_ms, cells[engine, rtt_ms])
            context.check(site, engine)

        await context.each([partial(play, TORCH, ours), partial(play, VLLM, theirs)], [PACED])
    return {"engines": [compared(rtt_ms, cells[TORCH, rtt_ms], cells[VLLM, rtt_ms]) for rtt_ms in RTTS_MS]}


def compared(rtt_ms: float, ours: Cell, theirs: Cell) -> dict[str, Any]:
    """Print and return the figures of both engines at one round trip, and vLLM's speed over ours by prompt."""
    key = CellKey(PACED, DRAFT, rtt_ms)
    found: dict[str, Any] = {"rtt_ms": rtt_ms}
    for engine, cell in ((TORCH, ours), (VLLM, theirs)):
        all_figures = figures(key, cell)
        print(f"{engine}: {line(key, all_figures)}", flush=True)
        found[engine] = {name: all_figures[name] for name in KEYS} | {"step_ms": step_ms(cell.streamed)}
    middle, low, high = interval(over(theirs.adaptive, ours.adaptive))
    streaming = statistics.median(ratio for each in over(theirs.streaming, ours.streaming).values() for ratio in each)
    print(
        f"{rtt_ms:g} ms: vLLM over ours {middle:.2f} [{low:.2f} .. {high:.2f}] with adaptive windows,"
        f" {streaming:.2f} streamed",
        flush=True,
    )
    return found | {
        "vllm_over_torch": round(middle, 3),
        "vllm_over_torch_95": [round(low, 3), round(high, 3)],
        "streaming_over_torch": round(streaming, 3),
    }


def step_ms(streamed: list[SessionOutcome]) -> float:
    """Return the median time between two deliveries of streaming: that of a step."""
    return round(statistics.median(gap for outcome in streamed for gap in outcome.gaps_ms), 1)
