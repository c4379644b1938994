"""Derive the figures of one cell: the same prompts streamed and speculated, on one verifier over one link.

Where a verifier has several sessions they arrive one by one, by the same schedule in both arms, so that prompts are
read while others generate. A session's ratio is its speed, from request to last token, over that of the same prompt
streamed. A cell's figure is the median of the prompts' ratios, with a bootstrapped 95% interval over prompts. First
tokens are of prompts of about a thousand tokens, in some of the cells; where a verifier has several sessions, these are
opened while the others generate.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.support.draft_replay.client import SessionOutcome
from benchmarks.support.harness import quantile, rounded
from benchmarks.window.testbed import VerifierMachine

DRAWS = 1_000
STEPS = 16
"""Steps of a session under one decision before its predicted tokens per step are compared."""


@dataclass(frozen=True)
class CellKey:
    """Identify a cell: machine, draft and round trip."""

    machine: VerifierMachine
    draft: str
    rtt_ms: float

    def __str__(self) -> str:
        return f"{self.machine}, {self.draft}, {self.rtt_ms:g} ms"

    @property
    def verifier(self) -> str:
        return "paced" if self.machine.pass_ms else "real CPU"


@dataclass(frozen=True)
class ObservedWindow:
    """Hold the window decision about a session as it stood at one moment."""

    at_s: float
    """Time on the clock of SessionOutcome.delivered_s."""
    session_id: str
    k: int
    depth: int
    tokens_per_step: float
    """Predicted tokens per step."""
    speedup: float
    first_acceptance: float
    rtt_ms: float
    draft_ms: float
    nodes_per_level: float
    min_acceptance: float = 0.0


@dataclass
class Cell:
    """Hold the sessions of both arms, by round and prompt."""

    streaming: list[list[SessionOutcome]] = field(default_factory=list)
    adaptive: list[list[SessionOutcome]] = field(default_factory=list)
    long_streaming: list[SessionOutcome] = field(default_factory=list)
    """Outcomes with prompts of about a thousand tokens, in the order of `long_adaptive`."""
    long_adaptive: list[SessionOutcome] = field(default_factory=list)
    observations: list[ObservedWindow] = field(default_factory=list)

    @property
    def ratios(self) -> dict[int, list[float]]:
        """Return prompt -> adaptive over streaming, one ratio for each round."""
        return over(self.adaptive, self.streaming)

    @property
    def played(self) -> list[SessionOutcome]:
        """Return the sessions with the adaptive window."""
        return [outcome for outcomes in self.adaptive for outcome in outcomes]

    @property
    def streamed(self) -> list[SessionOutcome]:
        return [outcome for outcomes in self.streaming for outcome in outcomes]

    @property
    def decided(self) -> dict[str, ObservedWindow]:
        """Return the last decision about each session."""
        return {each.session_id: each for each in self.observations}


def speed(outcome: SessionOutcome) -> float:
    """Return the tokens per second, counted from the request on."""
    return outcome.tokens / outcome.seconds


def interval(ratios: Mapping[int, Sequence[float]]) -> tuple[float, float, float]:
    """Return the median of the prompts' medians, and its bootstrapped 95% interval over prompts."""
    each = [statistics.median(values) for values in ratios.values()]
    rng = random.Random(1)
    draws = sorted(statistics.median(rng.choices(each, k=len(each))) for _ in range(DRAWS))
    return statistics.median(each), draws[int(0.025 * DRAWS)], draws[int(0.975 * DRAWS)]


def over(
    above: Sequence[Sequence[SessionOutcome]], below: Sequence[Sequence[SessionOutcome]]
) -> dict[int, list[float]]:
    """Return prompt -> the ratio of the speeds of its sessions, one for each round."""
    found: dict[int, list[float]] = {}
    for fast, slow in zip(above, below, strict=True):
        for number, (a, b) in enumerate(zip(fast, slow, strict=True)):
            found.setdefault(number, []).append(speed(a) / speed(b))
    return found


def gap_figures(played: Iterable[SessionOutcome], streamed: Iterable[SessionOutcome]) -> dict[str, float | None]:
    """Return quantiles of the milliseconds between deliveries, which a streamed session has for each of its tokens.

    The ratio is that of the 99th percentiles; None if nothing was delivered after a first delivery.
    """
    above, below = ([gap for outcome in outcomes for gap in outcome.gaps_ms] for outcomes in (played, streamed))
    high, low = quantile(above, 0.99), quantile(below, 0.99)
    return {
        "gap_ms_p50": rounded(quantile(above, 0.5)),
        "gap_ms_p99": rounded(high),
        "streaming_gap_ms_p50": rounded(quantile(below, 0.5)),
        "streaming_gap_ms_p99": rounded(low),
        "p99_gap_ratio": round(high / low, 3) if high is not None and low else None,
    }


def predicted_over_measured(cell: Cell) -> list[float]:
    """Return the tokens per step, predicted over measured, of each session that was decided about long enough.

    A delivery is a step. What comes between two looks counts for the decision that the first of them saw.
    """
    found = []
    for outcome in cell.played:
        observations = [
            each for each in cell.observations if outcome.session_id and each.session_id == outcome.session_id
        ]
        predicted = tokens = steps = 0.0
        for a, b in itertools.pairwise(observations):
            came = [at for at in outcome.delivered_s if a.at_s <= at < b.at_s]
            tokens += len(came)
            steps += len(set(came))
            predicted += a.tokens_per_step * len(set(came))
        if steps >= STEPS:
            found.append(predicted / tokens)
    return found


def figures(key: CellKey, cell: Cell) -> dict[str, Any]:
    """Return the cell's figures; None for each that was not measured."""
    middle, low, high = interval(cell.ratios)
    played, decided = cell.played, list(cell.decided.values())
    tokens = sum(outcome.tokens for outcome in played)
    steps, evaluated = (sum(getattr(outcome, name) for outcome in played) for name in ("steps", "evaluated"))
    firsts = _first_tokens(cell)
    return {
        "rtt_ms": key.rtt_ms,
        "draft": key.draft,
        "sessions": key.machine.sessions,
        "verifier": key.verifier,
        "vs_streaming": round(middle, 3),
        "vs_streaming_upper95": round(high, 3),
        "ttft_ratio": round(statistics.median(fast / slow for slow, fast in firsts), 3) if firsts else None,
        **gap_figures(played, cell.streamed),
        "vs_best_static": None,
        "k_median": statistics.median(each.k for each in decided) if decided else None,
        # A step brings a token besides; what a node carried that came too late to be evaluated is no hit.
        "hit_rate": round((tokens - steps) / evaluated, 3) if evaluated else None,
        "bytes_up_per_token": round(sum(outcome.wire_up for outcome in played) / tokens, 1),
        "bytes_down_per_token": round(sum(outcome.wire_down for outcome in played) / tokens, 1),
        "vs_streaming_lower95": round(low, 3),
        "slowest": round(min(statistics.median(values) for values in cell.ratios.values()), 3),
        "tokens_per_step": round(tokens / steps, 3),
        "messages_per_s": round(sum(o.appends for o in played) / sum(o.seconds for o in played), 1),
        "ttft_streaming_s": round(statistics.median(slow for slow, _ in firsts), 3) if firsts else None,
        "ttft_sessions": len(firsts),
        "ttft_wanted": bool(cell.long_streaming),
        "predicted": round(statistics.median(s.speedup for s in decided), 3) if decided else None,
        "min_acceptance": round(statistics.median(s.min_acceptance for s in decided), 3) if decided else None,
    }


def _first_tokens(cell: Cell) -> list[tuple[float, float]]:
    """Return the seconds to the first token of each long prompt, streamed and adaptive, if both arms have one."""
    pairs = zip(cell.long_streaming, cell.long_adaptive, strict=True)
    each = ((slow.first_token_s, fast.first_token_s) for slow, fast in pairs)
    return [(slow, fast) for slow, fast in each if slow is not None and fast is not None]


def line(key: CellKey, found: Mapping[str, Any]) -> str:
    """Format the figures of a cell as a line of text."""
    low, high = found["vs_streaming_lower95"], found["vs_streaming_upper95"]
    read = " (prompts read at this CPU's speed)" if key.machine.pass_ms and found["ttft_wanted"] else ""
    shown = {name: "-" if value is None else value for name, value in found.items()}
    return (
        f"{key.machine!s:<34}{key.draft:<7}{key.rtt_ms:>5.0f} ms  {found['vs_streaming']:.2f}x"
        f" [{low:.2f} .. {high:.2f}], slowest {found['slowest']:.2f};"
        f" {found['tokens_per_step']:.2f} tokens a step; first token {shown['ttft_ratio']}x{read},"
        f" deliveries {shown['gap_ms_p50']} ms apart at p50, {shown['gap_ms_p99']} at p99,"
        f" {shown['p99_gap_ratio']}x; {found['bytes_up_per_token']:.0f} bytes up a token,"
        f" {found['bytes_down_per_token']:.0f} down, {found['messages_per_s']:.0f} Appends up/s;"
        f" k {shown['k_median']}, {shown['hit_rate']} of the nodes accepted, predicted {shown['predicted']}x"
    )


def merged(cells: Iterable[Cell]) -> Cell:
    """Return one cell with all sessions of several cells."""
    whole = Cell()
    for cell in cells:
        whole = replace(
            whole,
            streaming=whole.streaming + cell.streaming,
            adaptive=whole.adaptive + cell.adaptive,
            observations=whole.observations + cell.observations,
        )
    return whole
