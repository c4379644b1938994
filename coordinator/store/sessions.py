"""Keep sessions: where they are placed, their epochs, whether they are over, and how far they speculate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coordinator.config import TenantLimits
from coordinator.placement import CHOICES, Candidate
from coordinator.records import PlacementRequest, Prior, WorkloadKey
from coordinator.store import keys, quotas, redis_codec, revocations
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import Killed, PermissionDenied
from outrider.core.text import short_id
from outrider.wire.ticket import Claims, Target
from outrider.wire.v1 import coordinator_pb2 as pb

ATTACH_GRACE_MS = 10_000
"""Milliseconds for which a session keeps its place before its device attaches: two attempts to connect."""
CANDIDATES_AT_ONCE = 32
"""Verifiers that one atomic step looks at; the next batch is asked only if all of these are full."""
EPOCH_SPAN = 256
"""Attaches that one grant allows: reconnects to one verifier without asking the coordinator."""


class Placement(NamedTuple):
    """Tells where a session was placed."""

    epoch: int
    """The first of the primary's range, which the standby's range follows directly."""
    primary: tuple[pb.Grant, Target]
    """How the verifier is reached, without a ticket yet, and its target."""
    standby: tuple[pb.Grant, Target] | None
    max_streams: int
    """The most streams that the tenant may have at a verifier; 0: any number."""
    until_unix: float
    """When the place is given back if no device attaches, in seconds by the store's clock."""


class SessionStore:
    """Reads and writes the sessions in Redis. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def place(
        self,
        claims: Claims,
        request: PlacementRequest,
        ranked: Sequence[Candidate],
        defaults: TenantLimits,
    ) -> Placement | int:
        """Place a session, name a standby and use up two ranges of epochs, in one step.

        Raises Killed if an operator has ended the session, PermissionDenied if its device has closed it, Overloaded if
        its tenant may not have another one now.

        Return how many of the candidates are alive if none of them has room. claims: every epoch of the placement is
        greater than their last one. ranked: verifiers in the order of placement.candidates. defaults: limits of tenants
        for whom an operator has set no others.
        """
        if not claims.api_key_id:
            return await self._place(claims, request, ranked, TenantLimits(), (), quotas.RUNNING_MS)
        tenant = claims.tenant
        waiting = ("ZREVRANGE", keys.waiting(request.target), 0, quotas.MOST_WAITING - 1)
        commands: list[tuple[Any, ...]] = [("HMGET", keys.TENANT_LIMITS, tenant), waiting]
        if claims.epoch_last:
            commands += [("HMGET", keys.session(claims.session_id), "live", "moves"), ("TIME",)]
        [own], names, *moved = await self._store.call("placing", commands)
        limits, ahead = quotas.limits_from(own, defaults), [name for name in names if name != tenant]
        if moved:  # a session that a verifier has reported a moment ago is not opened, but moves
            (live, moves), (now_s, _) = moved
            moves_on = int(moves or 0) < quotas.MOST_MOVES
            if moves_on and 1000 * int(now_s) - int(live or 0) < quotas.RUNNING_MS:
                return await self._place(claims, request, ranked, limits, ahead, quotas.RUNNING_MS)
        await quotas.count_open(self._store, tenant, limits)
        placed: Placement | int = 0
        try:
            placed = await self._place(claims, request, ranked, limits, ahead, 0)
            return placed
        finally:
            if isinstance(placed, int):
                await quotas.take_back(self._store, tenant)

    async def _place(
        self,
        claims: Claims,
        request: PlacementRequest,
        ranked: Sequence[Candidate],
        limits: TenantLimits,
        waiting: Sequence[str],
        running_ms: int,
    ) -> Placement | int:
        """Place the session.

        waiting: other tenants that have asked for a place at the target last. running_ms: time after its last report in
        which the session moves, and does not begin.
        """
        session_id, tenant, shares = claims.session_id, claims.tenant, claims.api_key_id != ""
        alive = 0
        for start in range(0, len(ranked), CANDIDATES_AT_ONCE):
            those = ranked[start : start + CANDIDATES_AT_ONCE]
            touched = [keys.session(session_id), keys.waiting(request.target)]
            touched += [keys.tenant_places(name) for name in (tenant, *waiting)]
            name = "" if request.weights else request.target  # weights bind, names may change
            arguments: list[Any] = [session_id, tenant, claims.epoch_last, EPOCH_SPAN, ATTACH_GRACE_MS]
            arguments += [quotas.ATTACH_GRACES * ATTACH_GRACE_MS, CHOICES, name, *(request.weights or ("", ""))]
            arguments += [request.draft, request.traffic, int(shares), limits.max_places, running_ms]
            arguments += [
                int(start + len(those) == len(ranked)),
                quotas.WAIT_MS,
                request.device_id,
                len(waiting),
                *waiting,
            ]
            for verifier_id, failed in those:
                touched += [key(verifier_id) for key in (keys.verifier, keys.placements, keys.cordon)]
                arguments += [verifier_id, int(failed)]
            reply = await self._store.run("place", touched, arguments)
            if reply[0]:
                return _placement(reply, limits)
            if reply[1] == -3:
                raise quotas.refusal(tenant, *reply[2:])
            if reply[1] == -2:
                raise PermissionDenied(f"the device has closed session {short_id(session_id)}; open a new one")
            if reply[1] == -1:
                raise Killed(f"an operator has ended session {short_id(session_id)}; it cannot be resumed")
            alive += int(reply[1])
        return alive

    async def close(self, claims: Claims, *, keep_ms: int) -> None:
        """Forget a session and free its place on the verifier that its ticket names and on those that may serve it.

        keep_ms: milliseconds for which one of its tickets may be valid: nobody uses them any more.
        """
        placed = await self.verifiers_of(claims.session_id)
        await self._end(claims.session_id, claims.tenant, {claims.audience, *placed} - {""}, "closed", keep_ms)

    async def kill(self, session_id: str, *, keep_ms: int, ticket_ms: int) -> tuple[str, ...]:
        """End a session for good and free its place. Return the verifiers that may have served it, () if unknown.

        keep_ms, ticket_ms: milliseconds for which one of its tickets proves ownership, and lets a device attach.
        """
        verifier_ids = await self.verifiers_of(session_id)
        if verifier_ids:
            [tenant] = await self._store.call("session", [("HGET", keys.session(session_id), "tenant")])
            await revocations.add(self._store, "session_id", session_id, keep_ms=ticket_ms)
            await self._end(session_id, tenant or "", verifier_ids, "killed", keep_ms)
        return verifier_ids

    async def _end(self, session_id: str, tenant: str, verifier_ids: Iterable[str], how: str, keep_ms: int) -> None:
        touched = [keys.session(session_id), keys.tenant_places(tenant)]
        for name in verifier_ids:
            touched += [keys.placements(name), keys.telemetry(name)]
        await self._store.run("close", touched, [session_id, how, keep_ms])

    async def verifiers_of(self, session_id: str) -> tuple[str, ...]:
        """Return the verifiers that may serve a session: the one that reports it, then the one of its placement."""
        command = ("HMGET", keys.session(session_id), "reporter", "verifier")
        [names] = await self._store.call("session", [command])
        return tuple(dict.fromkeys(name for name in names if name))

    async def held_by(self, verifier_id: str) -> list[str]:
        """Return the ids of all sessions that hold a place on the verifier, in order."""
        [held] = await self._store.call("placements", [("ZRANGE", keys.placements(verifier_id), 0, -1)])
        return sorted(map(str, held))

    async def held(self, verifier_ids: Sequence[str], most: int) -> tuple[list[tuple[str, str]], int]:
        """Return (verifier id, session id) of `most` sessions at most that hold a place, and how many there are."""
        commands: list[tuple[Any, ...]] = []
        for verifier_id in verifier_ids:
            key = keys.placements(verifier_id)
            commands += [("ZRANGE", key, 0, most - 1), ("ZCARD", key)]
        replies = await self._store.call("placements", commands)
        found = [(v, s) for v, sessions in zip(verifier_ids, replies[::2], strict=True) for s in sessions]
        return found[:most], sum(replies[1::2])

    async def find(self, held: Iterable[tuple[str, str]]) -> list[pb.SessionStatus]:
        """Return the sessions of (verifier id, session id), but for those that are on another verifier by now."""
        asked = list(held)
        commands: list[tuple[Any, ...]] = []
        for verifier_id, session_id in asked:
            commands += [("HGET", keys.telemetry(verifier_id), session_id), ("HGETALL", keys.session(session_id))]
        replies = await self._store.call("sessions", commands)
        found = list(zip(asked, replies[::2], replies[1::2], strict=True))
        elsewhere = {  # on the verifier that has reported them last, if that still does
            (verifier_id, session_id): keys.telemetry(placed["reporter"])
            for (verifier_id, session_id), _, placed in found
            if placed.get("reporter", verifier_id) != verifier_id
        }
        kept = await self._store.call("sessions", [("HEXISTS", key, name) for (_, name), key in elsewhere.items()])
        gone = {one for one, reported in zip(elsewhere, kept, strict=True) if reported}
        return [
            redis_codec.session_status(session_id, verifier_id, reported, placed)
            for (verifier_id, session_id), reported, placed in found
            if (verifier_id, session_id) not in gone
        ]


class WindowStore:
    """The decisions, operators' bounds and priors that Redis holds. Methods raise Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def decisions(self, verifier_ids: Sequence[str]) -> dict[str, pb.WindowDecision]:
        """Return the last decision on each session of these verifiers, by session id."""
        commands = [("GET", keys.windows(verifier_id)) for verifier_id in verifier_ids]
        replies = await self._store.call("windows", commands)
        return {
            decision.session_id: decision
            for reply in replies
            for decision in pb.ListWindowsResponse.FromString(redis_codec.written(reply)).windows
        }

    async def set_decisions(self, verifier_id: str, made: Sequence[pb.WindowDecision], *, keep_ms: int) -> None:
        """Replace the decisions on a verifier's sessions."""
        for decision in made:
            decision.verifier_id = verifier_id
        written = pb.ListWindowsResponse(windows=made).SerializeToString()
        await self._store.call("set_decisions", [("SET", keys.windows(verifier_id), written, "PX", keep_ms)])

    async def bounds(self, session_ids: Iterable[str]) -> dict[str, pb.WindowBounds]:
        """Return the bounds that operators have set, of these sessions by id; those of "" are for all others."""
        asked = list(dict.fromkeys(session_ids))
        commands = [("GET", keys.BOUNDS), *(("HGET", keys.session(name), "bounds") for name in asked)]
        return redis_codec.bounds_from(zip(("", *asked), await self._store.call("bounds", commands), strict=True))

    async def set_bounds(self, session_id: str, bounds: pb.WindowBounds | None) -> bool:
        """Set the bounds of a session's window, kept as long as its record, or those of all others (""); None removes
        them. Return False if there is no such session."""
        if session_id:
            [known] = await self._store.call("session", [("HMGET", keys.session(session_id), "reporter", "verifier")])
            if not any(known):
                return False
        where = [keys.session(session_id), "bounds"] if session_id else [keys.BOUNDS]
        how = ("HSET", "HDEL") if session_id else ("SET", "DEL")
        written = [] if bounds is None else [bounds.SerializeToString()]
        await self._store.call("set_bounds", [(how[bounds is None], *where, *written)])
        return True

    async def priors(self, workloads: Iterable[WorkloadKey]) -> dict[WorkloadKey, Prior]:
        """Return the priors of these workload keys, where anything was measured."""
        asked = list(dict.fromkeys(workloads))
        replies = await self._store.call("priors", [("HGETALL", keys.prior(workload)) for workload in asked])
        return {key: redis_codec.prior_from(record) for key, record in zip(asked, replies, strict=True) if record}


def _placement(reply: Sequence[Any], limits: TenantLimits) -> Placement:
    """Decode the reply of place.lua."""
    epoch, primary, record, standby, standby_record, ends = reply
    streams = [limit for limit in (limits.max_streams, limits.max_places) if limit]
    return Placement(
        int(epoch),
        redis_codec.grant(primary, record),
        redis_codec.grant(standby, standby_record) if standby else None,
        min(streams, default=0),  # no more streams than places
        int(ends) / 1000,
    )
