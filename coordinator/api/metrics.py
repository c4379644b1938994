"""Export a coordinator's metrics: what this process counts, and what the store holds, read when a scrape comes.

Every coordinator of a cluster exports the same fleet: take the value of one, or the greatest. docs/metrics.md lists
all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.api.counters import CoordinatorCounters
from coordinator.records import VERIFIER_STATES, VerifierStatus
from coordinator.releases import metrics as drafts
from coordinator.releases.handlers import ReleaseHandlers
from coordinator.releases.records import Release
from coordinator.store.verifiers import VerifierStore
from outrider.core.errors import OutriderError
from outrider.telemetry.prometheus import counter, gauge, histogram

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Shortest time between two reads of the store, however many scrapes come."""


class CoordinatorCollector(Collector):
    """Collect a coordinator's metrics; call `refresh` before each scrape."""

    def __init__(
        self,
        counters: CoordinatorCounters,
        verifiers: VerifierStore,
        releases: ReleaseHandlers,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._counters = counters
        self._verifiers = verifiers
        self._releases = releases
        self._now = now
        self._fleet: tuple[Sequence[VerifierStatus], Sequence[Release]] | None = None
        """Verifiers and releases as they were read last; None while the store is away."""
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Read the store, unless that was done a moment ago; while it is away its figures are left out."""
        async with self._reading:
            if self._now() - self._read_at < REFRESH_S:
                return
            try:
                _, releases = await self._releases.releases()
                self._fleet = await self._verifiers.find(), releases
            except OutriderError:
                self._fleet = None
            except Exception:
                log.exception("the store cannot be read for its metrics")
                self._fleet = None
            self._read_at = self._now()

    def collect(self) -> Iterator[Metric]:
        yield from self._calls()
        yield from self._redis()
        yield from self._windows()
        verifiers, releases = self._fleet or (None, None)
        yield from _verifiers(verifiers)
        yield from drafts.families(releases, self._now())

    def _calls(self) -> Iterator[Metric]:
        counters = self._counters
        yield histogram("outrider_coordinator_rpc_seconds", "Calls, including failed ones", counters.calls_s, "rpc")
        text = "Calls that ended with an error"
        yield counter("outrider_coordinator_refusals", text, {**counters.refused}, "rpc", "kind")
        text = "Sessions placed; kind is open or resume (a failover)"
        yield counter("outrider_coordinator_placements", text, {**counters.placed}, "kind", "standby")

    def _redis(self) -> Iterator[Metric]:
        store = self._counters.store
        text = "Calls of the store, including failed ones"
        yield histogram("outrider_coordinator_redis_seconds", text, store.calls_s, "operation")
        text = "Times that Redis was not reached, or could not serve"
        yield counter("outrider_coordinator_redis_errors", text, {**store.failed}, "operation", "kind")
        text = "Whether Redis answered this scrape"
        yield gauge("outrider_coordinator_redis_up", text, float(self._fleet is not None))

    def _windows(self) -> Iterator[Metric]:
        counters, name, what = self._counters, "outrider_coordinator_window", "of windows decided"
        yield histogram(
            "outrider_coordinator_decide_seconds", "One decision on a verifier's windows", counters.decide_s
        )
        yield histogram(f"{name}_k", f"Levels that a step verifies, {what}", counters.k)
        yield histogram(f"{name}_depth", f"Levels drafted ahead, {what}", counters.depth)
        yield histogram(f"{name}_draft_wait_seconds", f"Wait before a plain step, {what}", counters.draft_wait_s)
        yield histogram(f"{name}_predicted_speedup", f"Over streaming, {what}", counters.speedup)


def _verifiers(verifiers: Sequence[VerifierStatus] | None) -> Iterator[Metric]:
    name, states = "outrider_coordinator", () if verifiers is None else VERIFIER_STATES
    by_state = {state: [one for one in verifiers or () if one.state == state] for state in states}
    text = "Verifiers with a lease, by state"
    yield gauge(f"{name}_verifiers", text, {state: len(found) for state, found in by_state.items()}, "state")
    live = {state: sum(one.telemetry.live_sessions for one in found) for state, found in by_state.items()}
    yield gauge(f"{name}_sessions", "Live sessions as last reported, by the state of their verifier", live, "state")
    places = sum(one.registration.capacity for one in by_state.get("serving", ()))
    text = "Sessions that serving verifiers can have at once"
    yield gauge(f"{name}_session_capacity", text, None if verifiers is None else places)
