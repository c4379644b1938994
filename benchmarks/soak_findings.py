"""Compare the observations of a soak run with the criteria."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.support import old_harness as harness
from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.support.malicious_client import RIGHT, MaliciousClient
from benchmarks.support.old_harness import Criterion, Size, quantile
from benchmarks.support.phases import AlternatingPhases, DeliveryGap

LONG_S = 600.0
"""Length of a run from which on memory must have stopped growing."""
SPAN_S = 300.0
"""Span at the end of a run over which memory growth is measured."""
MOST_GROWTH_MB = 20.0
HOUR_S = 3_600.0
"""Length of a run from which on the slope of memory over its last half is bounded: shorter ones still warm up there."""
MOST_SLOPE_MB = 1.0
"""MB an hour by which memory may grow, for each 1,000 sessions that end in an hour: 1 KB a session."""
BLOCKS = 12
T_95 = 2.228
"""Student's t of 97.5% with `BLOCKS - 2` degrees of freedom."""
MOST_HARM = 2.0
"""Limit of the median p99 in phases with the attacker, over the median p99 in those without."""


@dataclass(frozen=True)
class VerifierSample:
    """Hold the memory and sessions of the verifier at one moment."""

    at: float
    front_mb: float
    """Resident memory of the front."""
    engine_mb: float
    """Resident memory of the engine process."""
    kv_used: int
    live: int

    @property
    def rss_mb(self) -> float:
        return self.front_mb + self.engine_mb


@dataclass
class SessionTally:
    """Count how the honest sessions ended."""

    endings: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    """Sessions that delivered a token which is not the target's, or finished with too few or too many."""
    errors: Counter[str] = field(default_factory=Counter)
    gaps: list[DeliveryGap] = field(default_factory=list)
    """Delivery gaps of all sessions, however they ended."""
    tokens: int = 0

    def add(self, job: SessionJob, outcome: SessionOutcome) -> None:
        deliveries = list(dict.fromkeys(outcome.delivered_s))
        self.gaps += [DeliveryGap(end, ms) for end, ms in zip(deliveries[1:], outcome.gaps_ms, strict=False)]
        self.tokens += outcome.tokens
        self.differing += outcome.wrong > 0
        if outcome.error.startswith("Died"):
            self.endings["killed"] += 1
        elif outcome.error:
            self.endings["error"] += 1
            self.errors[outcome.error[:160]] += 1
        else:
            self.endings["finish" if outcome.finished else job.ending] += 1


@dataclass(frozen=True)
class DeliveryPace:
    """Hold milliseconds between deliveries over all phases of one kind."""

    p50: float | None
    p99: float | None
    typical: float
    """Median of each phase's p99, so that one phase on a busy machine decides nothing."""
    by_phase: str
    """The same with its range, as text."""

    @classmethod
    def of(cls, phases: Sequence[Sequence[float]]) -> DeliveryPace:
        together = [ms for phase in phases for ms in phase]
        each = [found for phase in phases if (found := quantile(phase, 0.99)) is not None]
        return cls(
            harness.rounded(quantile(together, 0.50)),
            harness.rounded(quantile(together, 0.99)),
            statistics.median(each) if each else math.nan,
            harness.spread(each) if each else "none",
        )


@dataclass(frozen=True)
class SoakFindings:
    """Hold the observations of one run. `kv_used`, `live`: at rest. `missing`: slots that are no longer promised.

    `without_lease`: samples of the verifier that are missing because it was not registered.
    """

    tally: SessionTally
    attacker: MaliciousClient
    phases: AlternatingPhases
    samples: Sequence[VerifierSample]
    seconds: float
    without_lease: int = 0
    kv_used: int = 0
    live: int = 0
    missing: int = 0

    @property
    def leaked(self) -> int:
        return self.kv_used + self.missing

    @property
    def growth_mb(self) -> float:
        return growth(self.samples, min(SPAN_S, self.seconds / 2))

    @property
    def slope_mb(self) -> tuple[float, float]:
        """Return the slope of memory in the last half, and the margin of its 95% interval, in MB an hour."""
        return slope(self.samples, self.seconds / 2)

    @property
    def slope_bound_mb(self) -> float:
        """Return the MB an hour by which memory may grow, by the thousands of sessions that ended in an hour."""
        return MOST_SLOPE_MB * sum(self.tally.endings.values()) / self.seconds * HOUR_S / 1_000.0

    def pace(self, *, attacked: bool) -> DeliveryPace:
        return DeliveryPace.of(self.phases.of(self.tally.gaps, disturbed=attacked))

    def criteria(self) -> Iterator[Criterion]:
        """Yield what must hold; memory and the attacker's effect only in a run that is long enough."""
        none = (
            ("slots leaked", self.leaked),
            ("sessions left at rest", self.live),
            ("honest sessions with another output", self.tally.differing),
            ("honest sessions that ended by an error", sum(self.tally.errors.values())),
            ("attacks that ended otherwise than they may", sum(self.attacker.wrong.values())),
        )
        for name, count in none:
            yield Criterion.none(name, count)
        # A busy machine may keep a verifier from reporting, so short runs do not fail for that.
        lease = "samples at which the verifier's lease had run out"
        yield Criterion.bound(lease, self.without_lease, at_most=0)
        if self.seconds >= LONG_S:
            ratio = self.pace(attacked=True).typical / self.pace(attacked=False).typical
            yield Criterion.bound("p99 with the attacker over without", ratio, at_most=MOST_HARM, strict=True)
            yield Criterion.none("attacks never made", len(self.attacker.not_made))
            growth_name = f"MB by which memory grew in the last {SPAN_S:.0f} s"
            yield Criterion.bound(growth_name, self.growth_mb, at_most=MOST_GROWTH_MB, strict=True)
        if self.seconds >= HOUR_S:
            name = "MB an hour by which memory may grow in the last half, the upper end of its 95% interval"
            yield Criterion.bound(name, sum(self.slope_mb), at_most=self.slope_bound_mb)

    def report(self, size: Size = Size.FULL) -> None:
        """Print observations, criteria and the last line; exit with status 1 if a criterion is not met."""
        for line in (*self._sessions(), *self._attacks(), *self._memory(), *self._neighbours()):
            print(line)
        attacked, alone = self.pace(attacked=True), self.pace(attacked=False)
        harness.finish(
            {
                "leaked_slots": self.leaked,
                "rss_growth_mb": round(self.growth_mb, 2),
                "rss_slope_mb_per_hour": round(self.slope_mb[0], 2),
                "rss_slope_upper_mb_per_hour": round(sum(self.slope_mb), 2),
                "rss_slope_bound_mb_per_hour": round(self.slope_bound_mb, 2),
                "p50_ms": attacked.p50,
                "p99_ms": attacked.p99,
                "p50_ms_without_attacker": alone.p50,
                "p99_ms_without_attacker": alone.p99,
                "differing": self.tally.differing,
                "errors": sum(self.tally.errors.values()),
                "sessions": sum(self.tally.endings.values()),
                "tokens": self.tally.tokens,
                "attacks": sum(self.attacker.answers.values()),
                "wrong_endings": sum(self.attacker.wrong.values()),
                "samples_without_lease": self.without_lease,
                "seconds": round(self.seconds),
            },
            self.criteria(),
            size,
        )

    def _sessions(self) -> Iterator[str]:
        yield "sessions: " + ", ".join(f"{ending} {count}" for ending, count in sorted(self.tally.endings.items()))
        for error, count in self.tally.errors.most_common():
            yield f"error, {count} times: {error}"

    def _attacks(self) -> Iterator[str]:
        for (attack, ended), count in sorted(self.attacker.answers.items()):
            wrong = "" if ended in RIGHT[attack] else f"   WRONG, must be {' or '.join(sorted(RIGHT[attack]))}"
            yield f"attack {attack:<24} {ended:<20} {count:>5}{wrong}"
        for attack in self.attacker.not_made:
            yield f"attack {attack:<24} never made"

    def _memory(self) -> Iterator[str]:
        samples = self.samples
        for sample in samples[:: max(1, len(samples) // 12)]:
            yield (
                f"after {sample.at - samples[0].at:4.0f} s: front {sample.front_mb:5.1f} MB,"
                f" engine {sample.engine_mb:6.1f} MB, {sample.live} live, {sample.kv_used} slots used"
            )
        yield (
            f"at most {max(s.live for s in samples)} live, {max(s.kv_used for s in samples)} slots used;"
            f" at rest {self.live} sessions, {self.kv_used} slots used, {self.missing} not to be had"
        )

    def _neighbours(self) -> Iterator[str]:
        yield f"{'ms between deliveries':<28} {'p50':>7} {'p99':>7}   p99 by phase"
        for name, attacked in (("with the attacker", True), ("without it", False)):
            pace, count = self.pace(attacked=attacked), len(self.phases.of((), disturbed=attacked))
            yield f"{name:<28} {pace.p50 or 0.0:7.1f} {pace.p99 or 0.0:7.1f}   {pace.by_phase}, {count} phases"


def slope(samples: Sequence[VerifierSample], span_s: float) -> tuple[float, float]:
    """Return the slope of memory over the last `span_s` and the margin of its 95% interval, in MB an hour.

    A line is fitted by least squares to the means of BLOCKS equal spans of time, since samples that follow one another
    are not independent. Both are 0 where there are fewer samples than that.
    """
    span = [sample for sample in samples if sample.at >= samples[-1].at - span_s]
    if len(span) < BLOCKS:
        return 0.0, 0.0
    parts = np.array_split(np.array([(sample.at / HOUR_S, sample.rss_mb) for sample in span]), BLOCKS)
    hours, mb = np.array([part.mean(axis=0) for part in parts]).T
    hours = hours - hours.mean()
    spread = float(np.square(hours).sum())
    steep = float((hours * (mb - mb.mean())).sum()) / spread
    error = float(np.square(mb - mb.mean() - steep * hours).sum()) / (BLOCKS - 2)
    return steep, T_95 * math.sqrt(error / spread)


def growth(samples: Sequence[VerifierSample], span_s: float) -> float:
    """Return the growth in MB over the last `span_s`, between medians over a tenth of it."""
    last = samples[-1].at
    span = [sample for sample in samples if sample.at >= last - span_s]
    tenth = max(1, len(span) // 10)
    begin, end = (statistics.median(s.rss_mb for s in part) for part in (span[:tenth], span[-tenth:]))
    return end - begin
