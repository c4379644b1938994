"""Export a coordinator's metrics: what this process counts, and what the store holds, read when a scrape comes.

Every coordinator of a cluster exports the same fleet: take the value of one, or the greatest. docs/metrics.md lists
all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.releases.handlers import ReleaseHandlers
from coordinator.releases.lifecycle import CANARY
from coordinator.store.redis_store import RedisStore, call_histograms
from coordinator.store.verifiers import VerifierStore
from outrider.core.errors import OutriderError
from outrider.core.histogram import CALL_S, LEVELS, Histogram
from outrider.telemetry.prometheus import counter, gauge, histogram
from outrider.wire import manifest as manifests
from outrider.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

NAME = "outrider_coordinator"
STATES = ("serving", "cordoned", "draining")
"""Of verifiers; new sessions are placed on serving ones alone."""
RELEASE_STATES = ("candidate", "canary", "stable", "superseded", "rolled_back")
TARGET_DIGITS = 12
"""Digits of a target's hash in its label."""
SPEEDUPS = (0.8, 0.9, 0.98, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Histogram bounds of a speed-up over no speculation."""
REFRESH_S = 1.0
"""Shortest time between two reads of the store, however many scrapes come."""
PLACEMENTS = tuple((kind, standby) for kind in ("open", "resume") for standby in ("yes", "no"))
"""All series exist from the beginning: a rate misses the event that creates one."""


@dataclass
class CoordinatorCounters:
    """The counts of one coordinator process since it began, with those of its store."""

    store: RedisStore
    calls_s: defaultdict[str, Histogram] = field(default_factory=call_histograms)
    """Seconds per call, by RPC, whether or not it succeeded."""
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed calls, by RPC and class of the error."""
    placed: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys(PLACEMENTS, 0)))
    """Placements, by kind (open or resume) and whether there is a standby (yes or no)."""
    decide_s: Histogram = field(default_factory=lambda: Histogram(CALL_S))
    """CPU seconds per decision on all sessions of a verifier."""
    window_k: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    """Speculation lengths that were decided, one for each second and session."""
    speedup: Histogram = field(default_factory=lambda: Histogram(SPEEDUPS))
    """Predicted of these windows, over no speculation."""

    def count_refusal(self, call: str, error: Exception) -> None:
        """Count a call that ends with this error. A defect counts as InternalError, which is what the peer gets."""
        self.refused[call, type(error).__name__ if isinstance(error, OutriderError) else "InternalError"] += 1

    def count_decisions(self, made: Iterable[pb.WindowDecision], seconds: float) -> None:
        """Count the decisions about all sessions of a verifier, which took so many seconds together."""
        self.decide_s.add(seconds)
        for decision in made:
            self.window_k.add(decision.window.k)
            self.speedup.add(decision.speedup)


class CoordinatorCollector(Collector):
    """Reads a coordinator's metrics; call `refresh` before each scrape."""

    def __init__(self, counters: CoordinatorCounters, verifiers: VerifierStore, releases: ReleaseHandlers) -> None:
        self._counters = counters
        self._verifiers = verifiers
        self._releases = releases
        self._fleet: tuple[Sequence[pb.VerifierStatus], Sequence[pb.Release]] | None = None
        """Verifiers and releases as they were read last; None while the store is away."""
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Read the store, unless that was done a moment ago; while it is away its figures are left out."""
        async with self._reading:
            if time.monotonic() - self._read_at < REFRESH_S:
                return
            try:
                _, releases = await self._releases.releases()
                self._fleet = await self._verifiers.find(), releases
            except Exception as error:
                self._fleet = None
                if not isinstance(error, OutriderError):
                    log.exception("the store cannot be read for its metrics")
            self._read_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        yield from self._counted()
        verifiers, releases = self._fleet or (None, None)
        yield from _verifiers(verifiers)
        yield from _releases(releases, time.time())

    def _counted(self) -> Iterator[Metric]:
        counts, store = self._counters, self._counters.store
        yield histogram(f"{NAME}_rpc_seconds", "Calls, including failed ones", counts.calls_s, "rpc")
        yield counter(f"{NAME}_refusals", "Calls that ended with an error", {**counts.refused}, "rpc", "kind")
        text = "Sessions placed; kind is open or resume (a failover)"
        yield counter(f"{NAME}_placements", text, {**counts.placed}, "kind", "standby")
        text = "Calls of the store, including failed ones"
        yield histogram(f"{NAME}_redis_seconds", text, store.calls_s, "operation")
        text = "Times that Redis was not reached, or could not serve"
        yield counter(f"{NAME}_redis_errors", text, {**store.failed}, "operation", "kind")
        yield gauge(f"{NAME}_redis_up", "Whether Redis answered this scrape", float(self._fleet is not None))
        yield histogram(f"{NAME}_decide_seconds", "CPU time of one decision on a verifier's windows", counts.decide_s)
        window, what = f"{NAME}_window", "of windows decided"
        yield histogram(f"{window}_k", f"Levels that a step verifies, {what}", counts.window_k)
        yield histogram(f"{window}_predicted_speedup", f"Over streaming, {what}", counts.speedup)


def _verifiers(verifiers: Sequence[pb.VerifierStatus] | None) -> Iterator[Metric]:
    by_state: dict[str, list[pb.VerifierStatus]] = {state: [] for state in STATES} if verifiers is not None else {}
    for one in verifiers or ():
        by_state["draining" if one.telemetry.draining else "cordoned" if one.cordoned else "serving"].append(one)
    text = "Verifiers with a lease, by state"
    yield gauge(f"{NAME}_verifiers", text, {state: len(found) for state, found in by_state.items()}, "state")
    live = {state: sum(one.telemetry.live_sessions for one in found) for state, found in by_state.items()}
    yield gauge(f"{NAME}_sessions", "Live sessions as last reported, by the state of their verifier", live, "state")
    places = sum(one.capacity_sessions for one in by_state.get("serving", ()))
    text = "Sessions that serving verifiers can have at once"
    yield gauge(f"{NAME}_session_capacity", text, None if verifiers is None else places)


def _releases(releases: Sequence[pb.Release] | None, now: float) -> Iterator[Metric]:
    states = Counter(map(manifests.state_of, releases or ()))
    shown = {} if releases is None else {state: states[state] for state in RELEASE_STATES}
    yield gauge(f"{NAME}_releases", "Releases of drafts by state", shown, "state")
    canaries = [release for release in releases or () if release.state == CANARY]
    trials = {_shown(manifests.read_unverified(release.manifest).weights_hash): release for release in canaries}
    ages = {target: now - release.since_unix for target, release in trials.items()}
    yield gauge(f"{NAME}_canary_age_seconds", "Since the trial's begin", ages, "target")
    samples: dict[tuple[str, str], float] = {}
    acceptance: dict[tuple[str, str], float] = {}
    log_evidence: dict[tuple[str, str], float] = {}
    for target, release in trials.items():
        e = release.evidence
        samples |= {(target, "canary"): e.canary_samples, (target, "stable"): e.stable_samples}
        acceptance |= {(target, "canary"): e.canary_acceptance, (target, "stable"): e.stable_acceptance}
        log_evidence |= {(target, "better"): e.log_better, (target, "worse"): e.log_worse}
    yield gauge(f"{NAME}_canary_samples", "Sessions compared", samples, "target", "arm")
    text = "Share of positions whose first proposal was accepted, 0 to 1"
    yield gauge(f"{NAME}_canary_acceptance_ratio", text, acceptance, "target", "arm")
    text = "Logarithm of the likelihood ratio that the canary is as good, or worse by the bound"
    yield gauge(f"{NAME}_canary_log_evidence", text, log_evidence, "target", "way")


def _shown(weights_hash: str) -> str:
    """Return the beginning of a target's hash."""
    return weights_hash.removeprefix("sha256:")[:TARGET_DIGITS]
