"""A coordinator's metrics: what this process counts, and what the store holds, read when somebody scrapes.

Every coordinator of a cluster tells of the same fleet: take one's word, or the greatest. docs/metrics.md lists all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.meters import CoordinatorMeters
from coordinator.records import Verifier
from coordinator.releases.handlers import ReleaseHandlers
from coordinator.releases.records import Evidence, Release, State
from coordinator.store import Store
from outrider.core.errors import OutriderError
from outrider.telemetry.families import counter, gauge, histogram
from outrider.wire import manifest as manifests

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""The store is read once in so long at most, however often somebody scrapes."""
TARGET_DIGITS = 12
"""Of a target's hash, as its label."""


@dataclass(frozen=True)
class _Seen:
    """What the store held."""

    verifiers: Sequence[Verifier]
    releases: Sequence[Release]


class CoordinatorCollector(Collector):
    def __init__(
        self,
        meters: CoordinatorMeters,
        store: Store,
        releases: ReleaseHandlers,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._meters = meters
        self._store = store
        self._releases = releases
        self._now = now
        self._seen: _Seen | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Read the store, if that was not done a moment ago; while it is away its figures are left out."""
        async with self._reading:
            if self._now() - self._read_at < REFRESH_S:
                return
            try:
                _, releases = await self._releases.listed("")
                self._seen = _Seen(await self._store.verifiers(), releases)
            except OutriderError:
                self._seen = None
            except Exception:
                log.exception("the store cannot be read for its metrics")
                self._seen = None
            self._read_at = self._now()

    def collect(self) -> Iterator[Metric]:
        yield from self._calls()
        yield from self._redis()
        yield from self._windows()
        yield from self._fleet(self._seen.verifiers if self._seen else None)
        yield from self._drafts(self._seen.releases if self._seen else None)

    def _calls(self) -> Iterator[Metric]:
        meters = self._meters
        yield histogram("outrider_coordinator_rpc_seconds", "Calls, whatever came of them", meters.calls_s, "rpc")
        text = "Calls that ended with an error"
        yield counter("outrider_coordinator_refusals", text, {**meters.refused}, "rpc", "kind")
        text = "Sessions placed; kind is open or resume, which is a failover"
        yield counter("outrider_coordinator_placements", text, {**meters.placed}, "kind", "standby")

    def _redis(self) -> Iterator[Metric]:
        store = self._meters.store
        text = "The store's methods, whatever came of them"
        yield histogram("outrider_coordinator_redis_seconds", text, store.calls_s, "operation")
        text = "Times that Redis was not reached, or could not serve"
        yield counter("outrider_coordinator_redis_errors", text, {**store.failed}, "operation", "kind")
        text = "Whether Redis answered this scrape"
        yield gauge("outrider_coordinator_redis_up", text, float(self._seen is not None))

    def _windows(self) -> Iterator[Metric]:
        meters, name, what = self._meters, "outrider_coordinator_window", "of windows decided"
        yield histogram("outrider_coordinator_decide_seconds", "One decision on a verifier's windows", meters.decide_s)
        yield histogram(f"{name}_k", f"Levels that a step verifies, {what}", meters.k)
        yield histogram(f"{name}_depth", f"Levels drafted ahead, {what}", meters.depth)
        yield histogram(f"{name}_patience_seconds", f"Wait before a plain step, {what}", meters.patience_s)
        yield histogram(f"{name}_predicted_speedup", f"Over streaming, {what}", meters.speedup)

    def _fleet(self, verifiers: Sequence[Verifier] | None) -> Iterator[Metric]:
        name = "outrider_coordinator"
        text = "Verifiers with a lease, by state"
        if verifiers is None:
            yield gauge(f"{name}_verifiers", text, {}, "state")
            states = None
        else:
            states = Counter("draining" if verifier.load.draining else "serving" for verifier in verifiers)
            yield gauge(f"{name}_verifiers", text, {s: states[s] for s in ("serving", "draining")}, "state")
        live = None if verifiers is None else sum(verifier.load.live_sessions for verifier in verifiers)
        yield gauge(f"{name}_sessions", "Live sessions, as verifiers last reported", live)
        places = None if verifiers is None else sum(v.registration.capacity for v in verifiers if not v.load.draining)
        yield gauge(f"{name}_session_capacity", "Sessions that those serving can have at once", places)

    def _drafts(self, releases: Sequence[Release] | None) -> Iterator[Metric]:
        name, known = "outrider_coordinator", releases or ()
        states = Counter(release.state for release in known)
        shown = {} if releases is None else {state.value: states[state] for state in State}
        yield gauge(f"{name}_releases", "Draft releases by state", shown, "state")
        trials = {_target(release): release for release in known if release.state is State.CANARY}
        now = self._now()
        ages = {target: now - release.since_unix for target, release in trials.items()}
        yield gauge(f"{name}_canary_age_seconds", "Since the canary's begin", ages, "target")
        evidence = {target: release.evidence or Evidence() for target, release in trials.items()}
        samples = {(t, arm): n for t, e in evidence.items() for arm, n in _arms(e.canary_samples, e.stable_samples)}
        yield gauge(f"{name}_canary_samples", "Sessions compared", samples, "target", "arm")
        right = {(t, arm): n for t, e in evidence.items() for arm, n in _arms(e.canary_right, e.stable_right)}
        yield gauge(f"{name}_canary_right_ratio", "First guesses that were right, 0 to 1", right, "target", "arm")
        shown_so_far = {
            (target, way): value
            for target, e in evidence.items()
            for way, value in (("better", e.log_better), ("worse", e.log_worse))
        }
        text = "Logarithm of the e-value that the canary is better, or worse, than the bound allows"
        yield gauge(f"{name}_canary_log_evidence", text, shown_so_far, "target", "way")


def _arms(canary: float, stable: float) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("canary", canary), ("stable", stable)


def _target(release: Release) -> str:
    """A target's hash by the manifest, shortened."""
    return manifests.read_unverified(release.manifest).weights_hash.removeprefix("sha256:")[:TARGET_DIGITS]
