"""Compare the streaming model's prediction for a recording with the measurement, with one window per session.

The model is coordinator.window.streaming, given the recording's acceptance history, the step that streaming took on
the same link, the round trip that the coordinator received, and the time of a decode in the recording; it may choose
the best of all windows. Both speeds exclude the first token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.support.draft_replay.client import SessionOutcome
from benchmarks.window.cell_player import CellPlayer
from benchmarks.window.cells import Cell, CellKey, interval
from benchmarks.window.context import RunContext
from benchmarks.window.plan import PACED
from coordinator.records import Window
from coordinator.window.controller import NEAR, SPARE, K
from coordinator.window.streaming import LinkTiming, replay

NODES_PER_LEVEL = 2.0
DEEPEST = 24


@dataclass(frozen=True)
class ModelComparison:
    """Compare model and measurement at one RTT, as medians over prompts."""

    rtt_ms: float
    vs_streaming: float
    """Measured speed over streaming."""
    predicted: float
    """Speed over streaming as the model predicts it."""
    vs_model: float
    """Measured over predicted speed, prompt by prompt."""
    predicted_as_received: float
    """Like `predicted`, with the drafting time that the coordinator received."""


def after_first(outcome: SessionOutcome) -> float:
    """Return the tokens per second after the first delivery."""
    begun = outcome.delivered_s[0]
    later = sum(at > begun for at in outcome.delivered_s)
    return later / (outcome.delivered_s[-1] - begun)


def way(key: CellKey, cell: Cell, decode_s: float) -> LinkTiming:
    """Return the timing that was measured in this cell. decode_s: of the draft, for each level."""
    rtts = [each.rtt_ms / 1e3 for each in cell.observations if each.rtt_ms] or [key.rtt_ms / 1e3]
    plain_s = statistics.median(gap / 1e3 for outcome in cell.streamed for gap in outcome.gaps_ms)
    row_s = key.machine.row_ms / 1e3
    return LinkTiming(statistics.median(rtts), decode_s, lambda nodes: plain_s + row_s * nodes)


def received_draft_s(cell: Cell, decode_s: float) -> float:
    """Return the drafting time that the coordinator received, or decode_s if it received none."""
    return statistics.median([each.draft_ms / 1e3 for each in cell.observations if each.draft_ms] or [decode_s])


def windows(over: LinkTiming) -> list[Window]:
    """Return all windows that the model chooses from."""
    plain_s = over.step_s(0)
    ahead = math.ceil(over.rtt_s / plain_s) + SPARE
    depths = [(k, depth) for k in K for depth in {min(k + ahead, DEEPEST), DEEPEST}]
    return [
        Window(k, depth, draft_wait_ms, NODES_PER_LEVEL)
        for k, depth in depths
        for draft_wait_ms in (0.0, 1e3 * NEAR * plain_s)
    ]


def predicted(history: bytes, over: LinkTiming) -> float:
    """Return the predicted tokens per second with the best window."""
    return max(replay(history, over, window).tokens_per_s for window in windows(over))


def against(key: CellKey, cell: Cell, histories: Sequence[bytes], decode_s: float) -> ModelComparison:
    """Compare a cell with the model. histories: the acceptance history of each of its prompts."""
    over = way(key, cell, decode_s)
    foreseen = [predicted(each, over) for each in histories]
    as_received = way(key, cell, received_draft_s(cell, decode_s))
    measured = [after_first(outcome) for outcome in cell.adaptive[0]]
    plain = [after_first(outcome) for outcome in cell.streaming[0]]
    return ModelComparison(
        key.rtt_ms,
        round(statistics.median(a / b for a, b in zip(measured, plain, strict=True)), 3),
        round(statistics.median(f * over.step_s(0) for f in foreseen), 3),
        round(statistics.median(a / f for a, f in zip(measured, foreseen, strict=True)), 3),
        round(statistics.median(predicted(each, as_received) * over.step_s(0) for each in histories), 3),
    )


def _otherwise(one: ModelComparison) -> str:
    if f"{one.predicted:.2f}" == f"{one.predicted_as_received:.2f}":
        return ""
    return f" ({one.predicted_as_received:.2f}x with the drafting time that the coordinator received)"


async def play_model(context: RunContext) -> dict[str, Any]:
    """Play one session at once on the paced verifier, with recordings whose match rate is near 0.8.

    One line at a time: with as many draft tokens as here two verifiers at once do not keep their pace.
    """
    rtts = context.plan.model_rtts_ms
    recorded = context.recordings.recorded("near")
    histories = context.recordings.acceptance_histories("near")
    cells: dict[float, Cell] = {rtt_ms: Cell() for rtt_ms in rtts}

    async with (
        context.testbed.site(PACED, context.core_pairs[0]) as site,
        site.swarm(context.recordings.file("near")) as swarm,
    ):
        player = CellPlayer(site, swarm, range(len(histories)), (), tokens=context.plan.tokens_of(PACED))
        await player.warm()
        for rtt_ms in rtts:
            await player.steady(rtt_ms, cells[rtt_ms])
        context.check(site)
    found = [against(CellKey(PACED, "near", rtt), cells[rtt], histories, recorded.decodes[0][1]) for rtt in rtts]
    for one in found:
        print(
            f"{PACED!s:<34}{one.rtt_ms:>5.0f} ms, match near 0.8: {one.vs_streaming:.2f}x after the first token;"
            f" the model says {one.predicted:.2f}x{_otherwise(one)}; {one.vs_model:.2f} of its speed",
            flush=True,
        )
    return {
        "paced": {f"{rtt:g}": round(interval(cells[rtt].ratios)[0], 3) for rtt in rtts},
        "vs_model": min(one.vs_model for one in found),
        "against": [asdict(one) for one in found],
    }
