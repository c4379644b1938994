"""Measure the round trip to each region that serves the target, beside requests, which never wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from outrider.core.errors import OutriderError
from outrider.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

REGIONS = 8
"""Regions that are measured and sent, the nearest ones."""
MOST = 4 * REGIONS
"""Regions that are remembered; while there are so many, no other is measured."""
KEEP_S = 600.0
"""Seconds for which a round trip is believed: a device that moves is elsewhere after minutes."""
AGAIN_S = 60.0
"""Seconds after which a region that did not answer is asked again."""
CALLS = 4
"""Health checks of one measurement: the first one waits for the connection, and the least of the others counts."""
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""The method by its name, whose empty request has no bytes: a device does without the package of its messages."""
WITHIN_S = 5.0
"""Seconds that a measurement may take; then the calls that were answered count."""
UNREACHABLE_MS = 60_000.0
"""The round trip to a region that did not answer, so that it is not taken for a near one that was not measured yet."""


class RoundTrips:
    """The round trips of one client by region, measured by health checks, which need no ticket and wait for no engine.

    dial: (address, tls) -> a channel of its own, which is closed after the measurement.
    """

    def __init__(
        self, dial: Callable[[str, bool], grpc.aio.Channel], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dial = dial
        self._clock = clock
        self._known: dict[str, tuple[float, float]] = {}
        """Region -> when it was measured, and the round trip in milliseconds."""
        self._measuring: set[str] = set()

    def known(self) -> dict[str, float]:
        """Return the round trips in milliseconds that were measured lately, by region, of the nearest regions."""
        now = self._clock()
        found = {region: ms for region, (at, ms) in self._known.items() if now - at < KEEP_S}
        return dict(sorted(found.items(), key=lambda entry: entry[1])[:REGIONS])

    async def measure(self, probes: Iterable[pb.RegionProbe]) -> None:
        """Measure the regions of these probes that are due, all at the same time."""
        now = self._clock()
        self._known = {region: entry for region, entry in self._known.items() if now - entry[0] < KEEP_S}
        due = {probe.region: probe for probe in list(probes)[:REGIONS] if self._is_due(probe.region, now)}
        self._measuring |= due.keys()
        try:
            await asyncio.gather(*map(self._measure, due.values()))
        finally:
            self._measuring -= due.keys()

    def _is_due(self, region: str, now: float) -> bool:
        at, ms = self._known.get(region, (float("-inf"), 0.0))
        if region in self._measuring or (region not in self._known and len(self._known) >= MOST):
            return False
        return now - at >= (AGAIN_S if ms == UNREACHABLE_MS else KEEP_S / 2)

    async def _measure(self, probe: pb.RegionProbe) -> None:
        took_ms: list[float] = []
        with contextlib.suppress(grpc.RpcError, OutriderError, TimeoutError):
            async with asyncio.timeout(WITHIN_S), self._dial(probe.address, probe.tls) as link:
                check: Any = link.unary_unary(HEALTH_CHECK)
                for _ in range(CALLS):
                    begun = time.perf_counter()
                    await check(b"")
                    took_ms.append(1e3 * (time.perf_counter() - begun))
        now, (at, before_ms) = self._clock(), self._known.get(probe.region, (float("-inf"), UNREACHABLE_MS))
        if not took_ms and before_ms < UNREACHABLE_MS and now - at < KEEP_S:
            return  # one verifier of the region may just have gone: what was measured holds until it is too old
        rtt_ms = min(took_ms[1:] or took_ms or [UNREACHABLE_MS])
        self._known[probe.region] = now, rtt_ms
        log.debug("region %s: round trip %s ms", probe.region, rtt_ms)
