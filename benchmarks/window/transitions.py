"""Judge how a session's window follows a change in mid-session, of the round trip or of the draft's quality.

A period begins with a change. It has three measures: the tokens in the three seconds after the change, over those of
streaming; the time until the window stays near the one with which the period ends; and how often it moves farther.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.support.draft_replay.client import SessionOutcome
from benchmarks.window.cells import ObservedWindow

AFTER_S = 3.0
FINAL_S = 1.0
"""Length of the end of a period; the last window in it is the one that was settled for."""
NEAR_K, NEAR_DEPTH = 1, 2
"""Levels by which windows may differ and still count as one."""


@dataclass(frozen=True)
class ChangePeriod:
    """Hold the time between two changes, in seconds on the clock of SessionOutcome.delivered_s."""

    name: str
    since_s: float
    until_s: float


@dataclass(frozen=True)
class Transition:
    """Hold the measures of one session in one period."""

    name: str
    vs_streaming: float
    settle_s: float | None
    """Seconds; None if no window was seen at the period's end."""
    changes: int
    """Number of changes of the window to one that is not near the last."""


def began_s(outcome: SessionOutcome) -> float:
    return outcome.delivered_s[0] - (outcome.first_token_s or 0.0)


def periods_of_link(outcome: SessionOutcome, changes: Sequence[tuple[float, float]]) -> list[ChangePeriod]:
    """Return a period for each change of the round trip. changes: (seconds since it began, ms)."""
    begun, ends = began_s(outcome), outcome.delivered_s[-1]
    times = [min(begun + at_s, ends) for at_s, _ in changes] + [ends]
    spans = zip(changes, times, times[1:], strict=False)
    return [ChangePeriod(f"to {rtt_ms:g} ms", at, until) for (_, rtt_ms), at, until in spans if until > at]


def periods_of_draft(outcome: SessionOutcome, span: tuple[int, int]) -> list[ChangePeriod]:
    """Return the periods in which the draft is wrong and after it. span: positions of the output."""
    falls, rises = (outcome.delivered_s[min(position, outcome.tokens - 1)] for position in span)
    ends = outcome.delivered_s[-1]
    periods = (ChangePeriod("collapse", falls, rises), ChangePeriod("recovery", rises, ends))
    return [period for period in periods if period.until_s > period.since_s]


def transition(
    period: ChangePeriod, outcome: SessionOutcome, streamed: SessionOutcome, observations: Sequence[ObservedWindow]
) -> Transition:
    """Measure one period. streamed: the same prompt on the same link; its speed over the whole session is used."""
    until = min(period.since_s + AFTER_S, period.until_s)
    came = sum(period.since_s <= at < until for at in outcome.delivered_s)
    plain = (streamed.tokens - 1) / (streamed.delivered_s[-1] - streamed.delivered_s[0]) * (until - period.since_s)
    seen = [s for s in observations if s.session_id == outcome.session_id and period.since_s <= s.at_s < period.until_s]
    changes = sum(not near(a, b) for a, b in itertools.pairwise(seen))
    return Transition(period.name, came / plain, settled_s(period, seen), changes)


def near(a: ObservedWindow, b: ObservedWindow) -> bool:
    """Return whether the two windows count as one."""
    return abs(a.k - b.k) <= NEAR_K and abs(a.depth - b.depth) <= NEAR_DEPTH


def settled_s(period: ChangePeriod, seen: Sequence[ObservedWindow]) -> float | None:
    """Return the seconds from the change until all following windows are near the last one.

    None where none was seen in the period's last second.
    """
    if not seen or seen[-1].at_s < period.until_s - FINAL_S:
        return None
    settled = itertools.takewhile(lambda each: near(each, seen[-1]), reversed(seen))
    return min(each.at_s for each in settled) - period.since_s


def middle(settled: Iterable[float | None]) -> float | None:
    """Return the median of those that are known."""
    known = [seconds for seconds in settled if seconds is not None]
    return round(statistics.median(known), 2) if known else None


def worst(settled: Iterable[float | None]) -> float | None:
    """Return the longest; None if one of them is not known."""
    found = list(settled)
    known = [seconds for seconds in found if seconds is not None]
    return round(max(known), 2) if known and len(known) == len(found) else None


def summary(found: Sequence[Transition]) -> dict[str, Transition]:
    """Return the worst of all sessions for each figure, by name."""
    by_name = {name: [t for t in found if t.name == name] for name in dict.fromkeys(t.name for t in found)}
    return {
        name: Transition(
            name,
            round(min(t.vs_streaming for t in each), 3),
            worst(t.settle_s for t in each),
            max(t.changes for t in each),
        )
        for name, each in by_name.items()
    }


def over_time(outcome: SessionOutcome, width_s: float = 1.0, step_s: float = 0.1) -> Iterator[tuple[float, float]]:
    """Yield (seconds since the session began, tokens per second in the second before)."""
    begun = began_s(outcome)
    steps = int((outcome.delivered_s[-1] - begun) / step_s)
    for i in range(int(width_s / step_s), steps + 1):
        at = begun + i * step_s
        yield i * step_s, sum(at - width_s <= token < at for token in outcome.delivered_s) / width_s
