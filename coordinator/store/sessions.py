"""Keep sessions: where they are placed, their epochs, whether they are over, and how far they speculate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from coordinator import placement
from coordinator.store import keys, quotas, redis_codec, revocations
from coordinator.store.redis_store import Command, RedisStore, milliseconds, scored
from outrider.core.errors import Killed, PermissionDenied
from outrider.core.text import short_id
from outrider.wire.ticket import Claims
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

ATTACH_GRACE_MS = 10_000
"""Milliseconds for which a session keeps its place before its device attaches: two attempts to connect."""
ATTACH_GRACES = 6
"""The record of a session that no device attaches to is kept for so many times as long as its place."""
CANDIDATES_AT_ONCE = 4
"""Verifiers that are looked at together; the next ones only if all of these are full."""
EPOCH_SPAN = 256
"""Attaches that one grant allows: reconnects to one verifier without asking the coordinator."""


class Placement(NamedTuple):
    """Tells where a session was placed."""

    epoch: int
    """The first of the primary's range, which the standby's range follows directly."""
    primary: pb.RegisterRequest
    """The verifier as it has registered."""
    standby: pb.RegisterRequest | None
    max_streams: int
    """The most streams that the tenant may have at a verifier; 0: any number."""
    until_unix: float
    """When the place is given back if no device attaches, in seconds by the store's clock."""


class _Session(NamedTuple):
    """Holds what is known of a session that is to be placed, and of its tenant."""

    claims: Claims
    failed: Collection[str]
    """Verifiers to avoid while any other has room."""
    device_id: str
    placed_on: Sequence[str]
    """Verifiers on which it may have a place already."""
    moves: bool
    """Whether it runs, and goes on whatever its tenant has used."""
    limits: pb.TenantLimits
    waiting: Sequence[str]
    """Other tenants that wait for a place at the target, those that asked last."""
    now_ms: int
    """Time of the store."""

    @property
    def shares(self) -> bool:
        """Return whether its tenant shares the places with others."""
        return self.claims.api_key_id != ""


class SessionStore:
    """Reads and writes the sessions in Redis. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def place(
        self, claims: Claims, ranked: Sequence[str], failed: Collection[str], device_id: str
    ) -> tuple[Placement | None, int]:
        """Place a session, name a standby and use up two ranges of epochs. Return the placement, None if no candidate
        has room, and how many of those that were looked at are alive.

        Raises Killed if an operator has ended the session, PermissionDenied if its device has closed it, Overloaded if
        its tenant may not have another one now.

        claims: every epoch of the placement is greater than their last one, and their target what the session is bound
        to, or the one that was named. ranked: verifiers in the order of placement.candidates. failed: those to avoid
        while any other has room.
        """
        facts = "closed", "live", "moves", "reporter", "verifier"
        commands: list[Command] = [("HMGET", keys.session(claims.session_id), *facts), ("TIME",)]
        commands += [("HGET", keys.TENANT_LIMITS, claims.tenant)]
        commands += [("ZREVRANGE", keys.waiting(claims.target.name), 0, quotas.MOST_WAITING - 1, "WITHSCORES")]
        (closed, live, moved, *placed_on), time, own, waiting = await self._store.call("placing", commands)
        _raise_if_over(closed, claims.session_id)
        now_ms, reported = milliseconds(time), int(live or 0)
        limits = quotas.limits_from(own) if claims.api_key_id else pb.TenantLimits()
        others = [name for name, until in scored(waiting) if until > now_ms and name != claims.tenant]
        moves = claims.epoch_last > 0 and int(moved or 0) < quotas.MOST_MOVES
        moves = moves and reported > 0 and now_ms - reported < quotas.RUNNING_MS
        known = tuple({name for name in placed_on if name})
        session = _Session(claims, failed, device_id, known, moves, limits, others, now_ms)
        if moves or not session.shares:
            return await self._place(session, ranked)
        await quotas.count_open(self._store, claims.tenant, limits)
        placed = None
        try:
            placed, alive = await self._place(session, ranked)
            return placed, alive
        finally:
            if placed is None:
                await quotas.take_back(self._store, claims.tenant)

    async def _place(self, session: _Session, ranked: Sequence[str]) -> tuple[Placement | None, int]:
        """Place the session on the best of the first candidates that have room."""
        alive = 0
        for start in range(0, len(ranked), CANDIDATES_AT_ONCE):
            found, open_to_it = await self._looked_at(session, ranked[start : start + CANDIDATES_AT_ONCE])
            alive += found
            while (primary := placement.best(open_to_it)) is not None:
                open_to_it = [one for one in open_to_it if one is not primary]
                same = [one for one in open_to_it if one.identity == primary.identity]
                if placed := await self._claimed(session, primary, placement.best(same)):
                    return placed, alive
        if session.shares and alive:
            await self._wait(session)
        return None, alive

    async def _looked_at(self, session: _Session, candidates: Sequence[str]) -> tuple[int, list[placement.Room]]:
        """Return how many of these candidates are alive, and those that have room. Raises Overloaded if the session's
        tenant gets no further place.

        Occupancy is the number of placements, or what the verifier reports if that is more.
        """
        session_id, tenants = session.claims.session_id, (session.claims.tenant, *session.waiting)
        since, reads = f"({session.now_ms}", list[Command]()
        for name in candidates:
            reads += [("HMGET", keys.verifier(name), "registration", "target", "live", "draining")]
            reads += [("ZCOUNT", keys.placements(name), since, "+inf"), ("EXISTS", keys.cordon(name))]
        reads += [("ZSCORE", keys.placements(name), session_id) for name in session.placed_on]
        reads += [("ZSCORE", keys.tenant_places(tenants[0]), session_id)]
        reads += [("ZCOUNT", keys.tenant_places(name), since, "+inf") for name in tenants]
        replies = await self._store.call("candidates", reads)
        scores = replies[3 * len(candidates) :]
        placed_on = {name for name, score in zip(session.placed_on, scores, strict=False) if score is not None}
        held, places, *of_others = scores[len(session.placed_on) :]
        if session.shares:
            places -= held is not None
            if 0 < session.limits.max_places <= places:
                raise quotas.refusal(session.claims.tenant, "places", session.limits.max_places, quotas.ASK_MS)
        alive, found = 0, []
        for i, name in enumerate(candidates):
            (registered, target, live, draining), used, cordoned = replies[3 * i : 3 * i + 3]
            serves = redis_codec.target_from(target, name) if target else None
            verifier = redis_codec.read(pb.RegisterRequest, registered, keys.verifier(name))
            if serves is None or not verifier.address or not placement.fits(serves, session.claims.target):
                continue
            alive += 1
            load = max(used, int(live or 0)) / verifier.capacity_sessions
            if draining != "1" and (name in placed_on or (load < 1.0 and not cordoned)):
                found.append(placement.Room(verifier, serves, name in session.failed, load))
        # Of tenants that want more, the one with the least gets the next place (max-min fairness).
        if session.shares and not session.moves and found and any(count < places for count in of_others):
            await self._wait(session)
            raise quotas.refusal(session.claims.tenant, "share", places, quotas.ASK_MS)
        return alive, found

    async def _claimed(
        self, session: _Session, primary: placement.Room, standby: placement.Room | None
    ) -> Placement | None:
        """Take a place and two ranges of epochs, with one script; return None if others were quicker."""
        claims, name = session.claims, primary.verifier.verifier_id
        facts = {
            "tenant": claims.tenant,
            "verifier": name,
            "standby": standby.verifier.verifier_id if standby else "",
            "weights": primary.target.weights_hash,
        }
        facts |= {"draft": claims.draft_release, "traffic": claims.traffic_class} if claims.draft_release else {}
        facts |= {"device": session.device_id} if session.device_id else {}
        touched = [keys.session(claims.session_id), keys.placements(name), keys.tenant_places(claims.tenant)]
        arguments = [claims.session_id, primary.verifier.capacity_sessions, int(session.shares)]
        arguments += [session.limits.max_places, ATTACH_GRACE_MS, ATTACH_GRACES * ATTACH_GRACE_MS]
        arguments += [claims.epoch_last, EPOCH_SPAN, *(part for fact in facts.items() for part in fact)]
        epoch, ends_ms, refused = await self._store.run("claim", touched, arguments)
        if refused == "places":
            raise quotas.refusal(claims.tenant, "places", session.limits.max_places, quotas.ASK_MS)
        if refused == "full":
            return None
        _raise_if_over(refused, claims.session_id)
        streams = [limit for limit in (session.limits.max_streams, session.limits.max_places) if limit]
        return Placement(
            int(epoch),
            primary.verifier,
            standby.verifier if standby else None,
            min(streams, default=0),  # no more streams than places
            int(ends_ms) / 1000,
        )

    async def _wait(self, session: _Session) -> None:
        """Keep that the session's tenant wants a place."""
        key, now_ms = keys.waiting(session.claims.target.name), session.now_ms
        commands: list[Command] = [("ZREMRANGEBYSCORE", key, "-inf", now_ms)]
        commands += [("ZADD", key, now_ms + quotas.WAIT_MS, session.claims.tenant), ("PEXPIRE", key, quotas.WAIT_MS)]
        await self._store.call("waiting", commands)

    async def close(self, claims: Claims, *, keep_ms: int) -> None:
        """Forget a session and free its place on the verifier that its ticket names and on those that may serve it.

        keep_ms: milliseconds for which one of its tickets may be valid: nobody uses them any more.
        """
        await self._end(claims.session_id, claims.tenant, claims.audience, "closed", keep_ms)

    async def kill(self, session_id: str, *, keep_ms: int, ticket_ms: int) -> tuple[str, ...]:
        """End a session for good and free its place. Return the verifiers that may have served it, () if unknown.

        keep_ms, ticket_ms: milliseconds for which one of its tickets proves ownership, and lets a device attach.
        """
        verifier_ids = await self.verifiers_of(session_id)
        if verifier_ids:
            [tenant] = await self._store.call("session", [("HGET", keys.session(session_id), "tenant")])
            await revocations.add(self._store, "session_id", session_id, keep_ms=ticket_ms)
            await self._end(session_id, tenant or "", "", "killed", keep_ms)
        return verifier_ids

    async def _end(self, session_id: str, tenant: str, verifier_id: str, how: str, keep_ms: int) -> None:
        """Forget a session, but for how it ended, and free its place, also on this verifier. What was killed stays."""
        record = keys.session(session_id)

        def decide(known: Sequence[str | None]) -> tuple[None, list[Command]]:
            closed, *placed_on = known
            if closed == "killed" and how != "killed":
                return None, []
            places = {keys.placements(name) for name in (verifier_id, *placed_on) if name}
            commands: list[Command] = [("ZREM", key, session_id) for key in (keys.tenant_places(tenant), *places)]
            commands += [("DEL", record), ("HSET", record, "closed", how), ("PEXPIRE", record, keep_ms)]
            return None, commands

        await self._store.change("close", [record], [("HMGET", record, "closed", "reporter", "verifier")], decide)

    async def verifiers_of(self, session_id: str) -> tuple[str, ...]:
        """Return the verifiers that may serve a session: the one that reports it, then the one of its placement."""
        command = ("HMGET", keys.session(session_id), "reporter", "verifier")
        [names] = await self._store.call("session", [command])
        return tuple(dict.fromkeys(name for name in names if name))

    async def held_by(self, verifier_id: str) -> list[str]:
        """Return the ids of all sessions that hold a place on the verifier, in order."""
        [held] = await self._store.call("placements", [("ZRANGE", keys.placements(verifier_id), 0, -1)])
        return sorted(map(str, held))

    async def count(self, verifier_ids: Sequence[str]) -> int:
        """Return how many sessions hold a place on these verifiers."""
        return sum(await self._store.call("placements", [("ZCARD", keys.placements(name)) for name in verifier_ids]))

    async def find(self, held: Iterable[tuple[str, str]]) -> list[pb.SessionStatus]:
        """Return the sessions of (verifier id, session id), but for those that are on another verifier by now."""
        asked = list(held)
        records = await self._store.call("sessions", [("HGETALL", keys.session(name)) for _, name in asked])
        reporters = [record.get("reporter", name) for (name, _), record in zip(asked, records, strict=True)]
        verifiers = sorted({name for name, _ in asked} | {*reporters})
        commands: list[Command] = [("MGET", keys.telemetry(name), keys.windows(name)) for name in verifiers]
        kept = dict(zip(verifiers, await self._store.call("sessions", commands), strict=True))
        reported = {name: redis_codec.sessions_from(texts[0], name) for name, texts in kept.items()}
        decided = {name: redis_codec.decisions_from(texts[1], name) for name, texts in kept.items()}
        return [
            redis_codec.session_status(
                session_id, name, reported[name].get(session_id), record, decided[name].get(session_id)
            )
            for (name, session_id), record, reporter in zip(asked, records, reporters, strict=True)
            if reporter == name or session_id not in reported[reporter]  # it has reported them last, and still does
        ]

    # --- windows: decisions, operators' bounds, and priors

    async def set_decisions(self, verifier_id: str, made: Sequence[pb.WindowDecision], *, keep_ms: int) -> None:
        """Replace the decisions on a verifier's sessions."""
        for decision in made:
            decision.verifier_id = verifier_id
        written = pb.WindowDecisions(decisions=made).SerializeToString()
        await self._store.call("set_decisions", [("SET", keys.windows(verifier_id), written, "PX", keep_ms)])

    async def default_bounds(self) -> pb.WindowBounds | None:
        """Return the bounds that an operator has set for all sessions without bounds of their own."""
        [bounds] = await self._store.call("bounds", [("GET", keys.BOUNDS)])
        return redis_codec.read(pb.WindowBounds, bounds, keys.BOUNDS) if bounds else None

    async def set_bounds(self, session_id: str, bounds: pb.WindowBounds | None) -> bool:
        """Set the bounds of a session's window, kept as long as its record, or those of all others (""); None removes
        them. Return False if there is no such session."""
        if session_id and not await self.verifiers_of(session_id):
            return False
        where = [keys.session(session_id), "bounds"] if session_id else [keys.BOUNDS]
        how = ("HSET", "HDEL") if session_id else ("SET", "DEL")
        written = [] if bounds is None else [bounds.SerializeToString()]
        await self._store.call("set_bounds", [(how[bounds is None], *where, *written)])
        return True

    async def priors(self, of: Iterable[str]) -> dict[str, SessionTelemetry]:
        """Return the priors under these keys (`keys.prior`), where anything was measured."""
        asked = list(dict.fromkeys(of))
        replies = await self._store.call("priors", [("HGETALL", key) for key in asked])
        return {key: redis_codec.prior_from(record) for key, record in zip(asked, replies, strict=True) if record}


def _raise_if_over(how: str | None, session_id: str) -> None:
    """Raise what tells of a session that has ended. how: "killed" or "closed"; nothing of one that goes on."""
    if how == "killed":
        raise Killed(f"an operator has ended session {short_id(session_id)}; it cannot be resumed")
    if how == "closed":
        raise PermissionDenied(f"the device has closed session {short_id(session_id)}; open a new one")
