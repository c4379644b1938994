"""Keep sessions: where they are placed, their epochs, whether they are over, and how far they speculate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coordinator import placement
from coordinator.config import CoordinatorConfig
from coordinator.records import (
    PlacementRequest,
    Prior,
    Revocation,
    SessionStatus,
    VerifierRegistration,
    WindowBounds,
    WindowDecision,
    WorkloadKey,
)
from coordinator.store import keys, quotas, redis_codec, revocations
from coordinator.store.ownership import LEASE_MS, Ownership
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import Killed, PermissionDenied
from outrider.core.text import short_id
from outrider.wire.ticket import Claims


class Placement(NamedTuple):
    """Tells where a session was placed."""

    epoch: int
    """The first of the primary's range, which the standby's range follows directly."""
    primary: VerifierRegistration
    standby: VerifierRegistration | None
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
        among: Sequence[str],
        config: CoordinatorConfig,
        *,
        last: bool,
    ) -> Placement | int:
        """Place a session, name a standby and use up two ranges of epochs, in one step.

        Raises Killed if an operator has ended the session, PermissionDenied if its device has closed it, Overloaded if
        its tenant may not have another one now.

        Return how many of the candidates are alive if none of them has room. claims: every epoch of the placement is
        greater than their last one. among: verifier ids, in the order of the random draw. last: whether no others are
        asked after these.
        """
        session_id, tenant, limits = claims.session_id, claims.tenant, config.tenant_limits
        touched = [keys.session(session_id), keys.closed(session_id)]
        touched += [keys.TENANT_LIMITS, keys.tenant_use(tenant), keys.tenant_places(tenant)]
        weights, tokenizer = request.weights or ("", "")
        target = "" if request.weights else request.target  # weights bind, names may change
        typical_rtt_ms = placement.typical_rtt_ms(request, config.unknown_rtt_ms)
        arguments: list[Any] = [session_id, tenant, claims.epoch_last, config.epoch_span, config.attach_grace_ms]
        arguments += [quotas.ATTACH_GRACES * config.attach_grace_ms, config.load_weight_ms, target, weights, tokenizer]
        arguments += [request.numerics_class, request.draft, request.traffic]
        arguments += [int(claims.api_key_id != ""), *vars(limits).values(), quotas.USE_MS, quotas.RUNNING_MS]
        arguments += [int(last), quotas.WAIT_MS, keys.TENANT_PLACES, keys.WAITING, *request.device_ids]
        for name in among:
            touched += [keys.verifier(name), keys.placements(name), keys.cordon(name)]
            arguments += [name, request.rtt_ms.get(name, typical_rtt_ms), int(name in request.failed)]
        reply = await self._store.run("place", touched, arguments)
        if not reply[0]:
            if reply[1] == -3:
                raise quotas.refusal(tenant, *reply[2:])
            if reply[1] == -2:
                raise PermissionDenied(f"the device has closed session {short_id(session_id)}; open a new one")
            if reply[1] == -1:
                raise Killed(f"an operator has ended session {short_id(session_id)}; it cannot be resumed")
            return int(reply[1])
        epoch, primary, record, standby, standby_record, max_streams, ends = reply
        return Placement(
            int(epoch),
            redis_codec.registration_from_reply(primary, record),
            redis_codec.registration_from_reply(standby, standby_record) if standby else None,
            int(max_streams),
            int(ends) / 1000,
        )

    async def close(self, session_id: str, served_by: str, *, keep_ms: int) -> None:
        """Forget a session and free its place on the verifier that a ticket named and on the one it was placed on.

        keep_ms: milliseconds for which one of its tickets may be valid: nobody uses them any more.
        """
        [placed] = await self._store.call("session", [("HGET", keys.session(session_id), "verifier")])
        verifier_ids = {served_by, placed} - {"", None}
        await self._store.run(
            "close", _session_keys(session_id, verifier_ids), [session_id, keep_ms, keys.TENANT_PLACES]
        )

    async def kill(self, session_id: str, *, keep_ms: int, ticket_ms: int) -> tuple[str, ...]:
        """End a session for good and free its place. Return the verifiers that may have served it, () if unknown.

        keep_ms, ticket_ms: milliseconds for which one of its tickets proves ownership, and lets a device attach.
        """
        verifier_ids = await self.verifiers_of(session_id)
        if verifier_ids:
            await revocations.add(self._store, Revocation("session", session_id), keep_ms=ticket_ms)
            arguments = [session_id, keep_ms, keys.TENANT_PLACES]
            await self._store.run("kill", _session_keys(session_id, verifier_ids), arguments)
        return verifier_ids

    async def verifiers_of(self, session_id: str) -> tuple[str, ...]:
        """Return the verifiers that may serve a session: the one that reports it, then the one of its placement."""
        commands = [("HGET", key(session_id), "verifier") for key in (keys.telemetry, keys.session)]
        return tuple(dict.fromkeys(name for name in await self._store.call("session", commands) if name))

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

    async def find(self, held: Iterable[tuple[str, str]]) -> list[SessionStatus]:
        """Return the sessions of (verifier id, session id), but for those that are on another verifier by now."""
        asked = list(held)
        commands = [("HGETALL", key(session_id)) for _, session_id in asked for key in (keys.telemetry, keys.session)]
        replies = await self._store.call("sessions", commands)
        return [
            status
            for (verifier_id, session_id), reported, placed in zip(asked, replies[::2], replies[1::2], strict=True)
            if (status := redis_codec.session_status(session_id, verifier_id, reported, placed)).verifier_id
            == verifier_id
        ]


class WindowStore:
    """The decisions, operators' bounds and priors that Redis holds. Methods raise Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def decisions(self, verifier_ids: Sequence[str]) -> dict[str, WindowDecision]:
        """Return the last decision on each session of these verifiers, by session id."""
        commands = [("HGET", keys.windows(name), "decisions") for name in verifier_ids]
        replies = await self._store.call("windows", commands)
        return {
            decision.session_id: decision
            for verifier_id, written in zip(verifier_ids, replies, strict=True)
            for decision in redis_codec.decisions_from_json(verifier_id, written)
        }

    async def last(self, verifier_id: str) -> tuple[tuple[WindowDecision, ...], float]:
        """Return the last decisions on a verifier's sessions, and when the report came that they were made from."""
        [found] = await self._store.call("windows", [("HMGET", keys.windows(verifier_id), "decisions", "reported")])
        return redis_codec.decisions_from_json(verifier_id, found[0]), float(found[1] or 0.0)

    async def set_decisions(
        self,
        verifier_id: str,
        decisions: Iterable[WindowDecision],
        reported_unix: float,
        ownership: Ownership,
        *,
        keep_ms: int,
    ) -> bool:
        """Replace the decisions on a verifier's sessions; return False if another coordinator has the right to.

        reported_unix: when the report came that they were made from, by the store's clock.
        """
        written = redis_codec.decisions_to_json(decisions)
        arguments = [keep_ms, ownership.id, LEASE_MS, f"{reported_unix:.3f}", written]
        arguments += [int(ownership.fresh), *ownership.live]
        return bool(await self._store.run("set_decisions", [keys.windows(verifier_id)], arguments))

    async def bounds(self, session_ids: Sequence[str]) -> dict[str, WindowBounds]:
        """Return the bounds of these sessions that operators have set; "" asks for the bounds of all others.

        session_ids: at least one.
        """
        [values] = await self._store.call("bounds", [("MGET", *map(keys.bounds, session_ids))])
        found = {i: redis_codec.bounds_from_json(written) for i, written in zip(session_ids, values, strict=True)}
        return {session_id: bounds for session_id, bounds in found.items() if bounds is not None}

    async def set_bounds(self, session_id: str, bounds: WindowBounds | None, *, keep_ms: int | None) -> None:
        """Set the bounds of a session's window; None removes them. keep_ms: None keeps them until they are removed."""
        key = keys.bounds(session_id)
        expiry = ("PX", keep_ms) if keep_ms is not None else ()
        command = ("SET", key, redis_codec.bounds_to_json(bounds), *expiry) if bounds is not None else ("DEL", key)
        await self._store.call("set_bounds", [command])

    async def priors(self, workloads: Iterable[WorkloadKey]) -> dict[WorkloadKey, Prior]:
        """Return the priors of these workload keys, where anything was measured."""
        asked = list(dict.fromkeys(workloads))
        replies = await self._store.call("priors", [("HGETALL", keys.prior(workload)) for workload in asked])
        return {key: redis_codec.prior_from(record) for key, record in zip(asked, replies, strict=True) if record}


def _session_keys(session_id: str, verifier_ids: Iterable[str]) -> list[str]:
    of_session = (keys.session(session_id), keys.telemetry(session_id), keys.closed(session_id))
    return [*of_session, *map(keys.placements, verifier_ids)]
