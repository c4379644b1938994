"""Check while faults go on what must hold all along: one owner of a session and epoch, no place and no KV slot kept.

Owners are those that the coordinators name and those whose logs do. Places are read from Redis itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping

import grpc
import redis.asyncio as redis_client

from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.sessions import TIMEOUT_S, Load
from coordinator.store import keys
from outrider.core.text import short_id
from outrider.wire.v1.coordinator_pb2 import StatusResponse

HELD_S = 60.0
"""Time after its end for which a session may hold its place: a verifier's silence timeout, the lease, and a fault."""
SLOTS_S = 30.0
"""Time for which a verifier may use more slots than its sessions need: its engine may be frozen, and its report old."""
SAMPLE_S = 1.0
_STREAM = re.compile(r"stream of epoch (\d+) ended")


class Invariants:
    """Notes what is violated, once each. slots: that one session takes at a verifier, at most."""

    def __init__(self, slots: int) -> None:
        self.violations: dict[str, str] = {}
        """What is violated -> a sentence about it, as it was first seen."""
        self.looks = 0
        """How often places, and owners and slots, were looked at."""
        self._slots = slots
        self._owners: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self._since: defaultdict[str, dict[str, float]] = defaultdict(dict)

    async def watch(self, cluster: ChaosCluster, load: Load) -> None:
        """Look once a second until cancelled, at the coordinators in turn."""
        while True:
            with contextlib.suppress(grpc.RpcError):
                self.see(await cluster.status(cluster.coordinators[self.looks % 2]), time.monotonic())
                self.looks += 1
            with contextlib.suppress(redis_client.RedisError, OSError, TimeoutError):
                ended = {outcome.session for outcome in load.outcomes}
                self.see_places(await places_in(cluster.redis.address), ended, time.monotonic())
                self.looks += 1
            await asyncio.sleep(SAMPLE_S)

    def read(self, name: str, line: str) -> None:
        """Take a line of a process's log: a verifier's tells which stream has ended."""
        if "stream of epoch" not in line:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if found := _STREAM.match(entry["message"]):
                self._own(entry["session"], int(found[1]), name)

    def see(self, status: StatusResponse, now: float) -> None:
        """Check the owners and the slots that a coordinator knows of."""
        for session in status.sessions:
            if session.reported:
                self._own(session.telemetry.session_id, session.telemetry.epoch, session.verifier_id)
        crowded = {}
        for verifier in status.verifiers:
            used, live = verifier.telemetry.kv_used, verifier.telemetry.live_sessions
            if used > live * self._slots:
                crowded[verifier.verifier_id] = (
                    f"uses {used} KV slots for {live} sessions of at most {self._slots} each"
                )
        self._lasting("slots", crowded, SLOTS_S, now)

    def see_places(self, places: Mapping[str, Collection[str]], ended: Collection[str], now: float) -> None:
        """Check the places. places: ids of the sessions that hold one, by Redis key. ended: ids of ended sessions."""
        held = {session: f"holds a place in {key}" for key, sessions in places.items() for session in sessions}
        kept = {session: f"{where}, and has ended" for session, where in held.items() if session in ended}
        self._lasting("place", kept, HELD_S, now)
        old = {session: f"{where}, longer than a session takes" for session, where in held.items()}
        self._lasting("old place", old, TIMEOUT_S + HELD_S, now)

    def rested(self, when: str, places: int, slots: int, seconds: float) -> None:
        """Note what is left of sessions, some seconds after all have ended."""
        if places or slots:
            self.violations[when] = (
                f"{when}: {places} places and {slots} KV slots are left after {seconds:.0f} s at rest"
            )

    def _own(self, session_id: str, epoch: int, verifier_id: str) -> None:
        name = short_id(session_id)
        owners = self._owners[name, epoch]
        owners.add(verifier_id)
        if len(owners) > 1:
            self.violations[f"owner {name} {epoch}"] = f"session {name}, epoch {epoch}: owned by {sorted(owners)}"

    def _lasting(self, kind: str, found: Mapping[str, str], allowed_s: float, now: float) -> None:
        """Note what was found by every look for longer than allowed. found: what is said, by session or verifier."""
        since = self._since[kind] = {name: self._since[kind].get(name, now) for name in found}
        for name, what in found.items():
            if (lasted_s := now - since[name]) > allowed_s:
                self.violations.setdefault(f"{kind} {name}", f"{kind} of {name}: {what}, for {lasted_s:.0f} s")


async def places_in(address: str) -> dict[str, list[str]]:
    """Return the ids of the sessions that hold a place by Redis, by the keys of verifiers and tenants. Raises what
    Redis' client does."""
    found: dict[str, list[str]] = {}
    async with redis_client.Redis.from_url(
        f"redis://{address}", socket_timeout=1.0, socket_connect_timeout=1.0, decode_responses=True
    ) as store:
        seconds, microseconds = await store.time()
        for of_one in (keys.placements("", "*"), keys.tenant_places("", "*")):
            async for key in store.scan_iter("*" + of_one.removeprefix(keys.of_target(""))):  # of any target
                found[key] = await store.zrangebyscore(key, seconds * 1_000 + microseconds // 1_000, "+inf")  # type: ignore[assignment]
    return found
