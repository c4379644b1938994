"""Estimate what speculation gains, from a few figures and without a cluster, as the coordinator would decide."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.window import MAX_DEPTH, RECENT, TOLERANCE, K, View, decide_together
from outrider.core.acceptance.history import HIT, MISS
from outrider.core.errors import BadRequest
from outrider.core.step_cost import KNOTS, StepCost
from outrider.core.text import counted, table
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

RTTS_MS = (0.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Distances that the table shows beside the one that was asked for."""
COLUMNS = ("RTT", "SPEED-UP", "SPECULATION LENGTH", "ACCEPTANCE LENGTH", "TOKENS/S PER USER", "WITHOUT")


def estimate(options: argparse.Namespace) -> int:
    """Print the estimate for the distance that was asked for and for others, and return the exit code.

    Raises BadRequest for a time of further tokens beside a curve.
    """
    if options.token_ms:
        if len(options.step_ms) > 1:
            raise BadRequest("--token-ms is for one number in --step-ms, whose curve has the further tokens already")
        options.step_ms[KNOTS[-1]] = options.step_ms[1] + (KNOTS[-1] - 1) * options.token_ms
    rows = [at_distance(options, rtt_ms) for rtt_ms in sorted({*RTTS_MS, options.rtt_ms})]
    [asked] = [row for row in rows if row["rtt_ms"] == options.rtt_ms]
    if options.output == "json":
        print(json.dumps({**asked, "summary": summary(options, asked), "distances": rows}, indent=2))
    else:
        print(f"{table(COLUMNS, [_cells(row) for row in rows])}\n\n{summary(options, asked)}")
    return 0


def at_distance(options: argparse.Namespace, rtt_ms: float) -> dict[str, Any]:
    """Return what the coordinator would decide for these users at this distance, and what it would predict."""
    cost = StepCost({rows: ms / 1e3 for rows, ms in options.step_ms.items()})

    def step_s(nodes: ArrayLike) -> NDArray[np.float64]:
        return cost.curve(options.users + np.asarray(nodes), options.users)

    widest = pb.Window(k=K[-1], depth=MAX_DEPTH, nodes_per_level=1.0)
    view = View(
        SessionTelemetry(session_id="user", rtt_ms=rtt_ms), outcomes(options.acceptance), options.draft_ms, widest
    )
    decisions = decide_together([view] * options.users, step_s, float(step_s(0.0)))
    speed_up = statistics.fmean(decision.speedup for decision in decisions)
    without = 1.0 / float(step_s(0.0))
    return {
        "rtt_ms": rtt_ms,
        "pays": speed_up >= 1.0 + TOLERANCE,
        "speed_up": round(speed_up, 3),
        "speculation_length": statistics.median_low(decision.window.k for decision in decisions),
        "acceptance_length": round(statistics.fmean(decision.tokens_per_step for decision in decisions), 3),
        "tokens_per_s_per_user": round(without * speed_up, 2),
        "tokens_per_s_per_user_without": round(without, 2),
    }


def outcomes(acceptance: Sequence[float]) -> bytes:
    """Return an acceptance history in which a draft token after n accepted ones is accepted at the rate acceptance[n].

    The last rate holds for all further ones. The lengths of the accepted runs are the quantiles of their distribution,
    so that chance plays no part.
    """
    rates = itertools.islice(itertools.chain(acceptance, itertools.repeat(acceptance[-1])), RECENT)
    reached = np.cumprod(list(rates))  # share of the runs that have 1, 2, ... accepted tokens or more
    misses = max(1, round(RECENT / (1.0 + float(reached.sum()))))  # each ends a run
    runs = [int((reached >= 1.0 - (number + 0.5) / misses).sum()) for number in range(misses)]
    random.Random(0).shuffle(runs)
    history = b"".join(bytes([HIT]) * run + bytes([MISS]) for run in runs)
    return history[:RECENT].ljust(RECENT, bytes([HIT]))


def summary(options: argparse.Namespace, row: dict[str, Any]) -> str:
    """Return in one sentence whether speculation pays."""
    where = f"at {options.rtt_ms:g} ms for {counted(options.users, 'user')}"
    if not row["pays"]:
        return (
            f"It does not pay {where}: the coordinator switches speculation off, or it gains less than {TOLERANCE:.0%}."
        )
    speed, without = row["tokens_per_s_per_user"], row["tokens_per_s_per_user_without"]
    each = " for each" if options.users > 1 else ""
    return (
        f"It pays {where}: {row['speed_up']:.2f} times the speed of no speculation, {speed:.1f} tokens a second{each}"
        f" instead of {without:.1f}, with at most {counted(row['speculation_length'], 'draft token')} a step."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['rtt_ms']:g} ms",
        f"{row['speed_up']:.2f}",
        f"{row['speculation_length']}",
        f"{row['acceptance_length']:.2f}",
        f"{row['tokens_per_s_per_user']:.1f}",
        f"{row['tokens_per_s_per_user_without']:.1f}",
    )
