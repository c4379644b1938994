"""Keep verifiers: their registration and lease, their telemetry, and what operators want of them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.config import SESSION_MS, CoordinatorConfig
from coordinator.store import keys, quotas, redis_codec, revocations
from coordinator.store.redis_store import Command, RedisStore, milliseconds, scored
from outrider.core.acceptance.history import KEPT
from outrider.wire.ticket import Target, target_from_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

PRIOR_POSITIONS = 256
"""Positions kept of a prior: more than decisions are made from, and few enough to be recent."""
LOST_MS = 3_600_000
"""Milliseconds after the end of its lease for which a verifier that did not leave in order is known as lost."""
RESTARTS_MS = 30 * 86_400_000
"""Milliseconds after the last one for which a verifier's restarts are known."""
RENEW_MS = 10_000
"""Milliseconds after which what is kept of a session that goes on is kept for longer again, and that it runs."""
PRIOR_MS = 86_400_000
"""A day: a prior without a report since yesterday is measured anew."""
FOLLOW = 1.05
"""Factor by which a known time moves at most with each session that brings outcomes: no single device moves it far."""


class Reported(NamedTuple):
    """The facts that a verifier's report finds in the store."""

    answer: pb.ReportResponse
    """Without what the store does not know: public keys, directives and the serial of releases."""
    priors: dict[str, str]
    """Keys of priors by session id, of the reported sessions that still draft with the release they were placed with:
    while a history holds outcomes of two releases, it is of neither."""
    devices: dict[str, str]
    """`device_id` of OpenSessionRequest by session id, of the reported sessions that were placed here."""
    decisions: dict[str, pb.WindowDecision]
    """The last ones on the verifier's sessions, by session id."""
    bounds: dict[str, pb.WindowBounds]
    """Bounds of windows that operators have set, by session id; those of "" are for all others."""
    weights: str
    """Weights hash of the verifier's target."""


class VerifierStore:
    """Reads and writes the verifiers in Redis. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._fleet: dict[str, Target] = {}
        """The verifiers' targets by their ids, as they were read or registered last."""
        self._read_at = -math.inf
        """When all were read, by the monotonic clock."""
        self._reading = asyncio.Lock()

    async def register(self, registration: pb.RegisterRequest, lease_ms: int) -> bool:
        """Start a lease. Return True if it replaced a live instance of the same id."""
        name, key = registration.verifier_id, keys.verifier(registration.verifier_id)
        instances = keys.instances(name)
        record: list[Any] = ["instance", registration.instance, "registration", registration.SerializeToString()]
        record += ["target", registration.target.SerializeToString()]

        def decide(instance: str | None, known: str | None, time: Sequence[str]) -> tuple[bool, list[Command]]:
            now_ms = milliseconds(time)
            last, restarts = map(int, (known or f"{registration.instance} 0").split())
            restarts += last != registration.instance
            replaced = instance is not None and int(instance) != registration.instance
            return replaced, [
                *([("DEL", keys.placements(name))] if replaced else []),  # its sessions died with it
                ("DEL", key),
                ("HSET", key, *record),
                ("PEXPIRE", key, lease_ms),
                ("SET", instances, f"{registration.instance} {restarts}", "PX", RESTARTS_MS),
                ("ZREMRANGEBYSCORE", keys.FLEET, "-inf", now_ms - LOST_MS),
                ("ZADD", keys.FLEET, now_ms + lease_ms, name),
            ]

        reads = [("HGET", key, "instance"), ("GET", instances), ("TIME",)]
        replaced = await self._store.change("register", [key, instances], reads, decide)
        self._fleet[name], self._read_at = target_from_proto(registration.target), -math.inf
        return replaced

    async def report(self, request: pb.ReportRequest, config: CoordinatorConfig) -> Reported | None:
        """Renew the lease and the sessions' placements, and keep the telemetry. Return None if the lease is lost."""
        verifier_id, tokens = request.verifier_id, dict(request.tenant_tokens)
        target = self._fleet.get(verifier_id) or (await self.fleet()).get(verifier_id)
        if target is None:
            return None
        commands = [self._renewal(target.name, request, config)]
        commands += [("MGET", keys.telemetry(verifier_id), keys.windows(verifier_id), keys.BOUNDS)]
        commands += [("ZREVRANGE", keys.EXHAUSTED, 0, quotas.MOST_EXHAUSTED - 1, "WITHSCORES")]
        commands += [("HMGET", keys.TENANT_LIMITS, *tokens)] if tokens else []
        commands += revocations.reads(request.revocations_seen)
        reply, kept, used_up, *limits, later, newest = await self._store.call("report", commands)
        if not reply[0]:
            self._fleet.pop(verifier_id, None)  # it may have another target by now
            return None
        _, drain, fresh, contended, now_ms, facts = reply
        revoked, seen = revocations.told(later, newest, request.revocations_seen)
        exhausted: Sequence[str] = [name for name, until in scored(used_up) if until >= int(now_ms)]
        if tokens and (fresh or not request.tokens_sequence):
            own = {name: quotas.limits_from(one) for name, one in zip(tokens, *limits, strict=True)}
            exhausted = await quotas.count_tokens(self._store, tokens, own, exhausted)
        answer = pb.ReportResponse(
            known=True,
            drain=bool(drain),
            revocations=revoked,
            revocations_seen=seen,
            store_unix=int(now_ms) / 1000,
            contended=bool(contended),
            exhausted_tenants=exhausted,
        )
        before, decided, default_bounds = kept
        found = Reported(answer, {}, {}, redis_codec.decisions_from(decided, verifier_id), {}, target.weights_hash)
        if default_bounds:
            found.bounds[""] = redis_codec.read(pb.WindowBounds, default_bounds, keys.BOUNDS)
        live = []
        for session, known in zip(request.sessions, json.loads(facts), strict=True):
            state, tenant, weights, draft, traffic, device, bounds = known
            name = session.session_id
            if state == "closed":
                answer.closed.append(name)
            elif not state:
                live.append(session)
            if draft and session.draft_release in ("", draft):
                found.priors[name] = keys.prior(weights, tenant, draft, traffic)
            if weights:  # a report alone tells the tenant
                found.devices[name] = device
            if bounds:
                found.bounds[name] = redis_codec.read(pb.WindowBounds, bounds, keys.session(name))
        known = redis_codec.sessions_from(before, verifier_id)
        await self._record(verifier_id, live, known, found.priors, 2 * config.lease_ms)
        return found

    def _renewal(self, target: str, request: pb.ReportRequest, config: CoordinatorConfig) -> Command:
        """Return the command that runs report.lua. target: its name."""
        verifier_id, sessions = request.verifier_id, request.sessions
        tenants = sorted({one.tenant for one in sessions} - {""})
        numbers = {name: number for number, name in enumerate(tenants, start=1)}
        told = {
            "verifier": verifier_id,
            "instance": str(request.instance),
            "live": request.verifier.live_sessions,
            "draining": int(request.verifier.draining),
            "lease_ms": config.lease_ms,
            "session_ms": SESSION_MS,
            "renew_ms": RENEW_MS,
            "batch": request.tokens_sequence if request.tenant_tokens else 0,
            "batch_ms": quotas.USE_MS,
            "tenants": tenants,
            "session_key": keys.session(""),
            "ids": [one.session_id for one in sessions],
            "epochs": [f"{one.epoch:020d}" for one in sessions],
            "numbers": [numbers.get(one.tenant, 0) for one in sessions],
        }
        arguments = [request.verifier.SerializeToString(), json.dumps(told)]
        touched = [
            keys.verifier(verifier_id),
            keys.placements(verifier_id),
            keys.FLEET,
            keys.cordon(verifier_id),
            keys.waiting(target),
            keys.counted(verifier_id),
            *map(keys.tenant_places, tenants),
        ]
        return self._store.script("report", touched, arguments)

    async def _record(
        self,
        verifier_id: str,
        sessions: Sequence[SessionTelemetry],
        before: Mapping[str, SessionTelemetry],
        priors: Mapping[str, str],
        keep_ms: int,
    ) -> None:
        """Keep the telemetry of sessions, and add the outcomes that are new in it to their priors.

        New are those of the tokens that were committed since the report before: as large a part of these has an outcome
        as of all tokens that a report is about, since for some nothing was proposed. Of a session that has gone on for
        long while nothing was kept of it, they may have been added already, and are left out.
        """
        grown = defaultdict[str, tuple[list[bytes], list[tuple[float, float]]]](lambda: ([], []))
        """Outcomes and times by the key of their prior."""
        for session in sessions:
            prior, last = priors.get(session.session_id), before.get(session.session_id)
            known = last.committed if last is not None and last.epoch == session.epoch else 0
            new, history = session.committed - known, session.acceptance_history
            added = min(new, round(new * len(history) / min(KEPT, session.committed))) if new > 0 else 0
            # What a lossy rule accepts is no prior for others.
            if prior and added and history and not session.lossy and (last is not None or session.committed <= KEPT):
                outcomes, times = grown[prior]
                outcomes.append(history[-added:])
                times.append((session.draft_ms, session.nodes_per_level))
        kept = pb.ReportRequest(sessions=sessions)
        for session in kept.sessions:
            session.ClearField("acceptance_history")  # of which the prior has it
        commands: list[Command] = [("SET", keys.telemetry(verifier_id), kept.SerializeToString(), "PX", keep_ms)]
        if grown:
            # One that is hardly known, as where every request has a class of its own, is kept for a shorter time.
            arguments: list[Any] = [PRIOR_POSITIONS, FOLLOW, PRIOR_MS, PRIOR_MS // 24]
            for outcomes, times in grown.values():
                arguments += [b"".join(outcomes), json.dumps(times)]
            commands += [self._store.script("prior", [*grown], arguments)]
        await self._store.call("telemetry", commands)

    async def deregister(self, verifier_id: str, instance: int) -> bool:
        """End the lease. Return False if this instance does not hold it."""
        key = keys.verifier(verifier_id)

        def decide(held: str | None) -> tuple[bool, list[Command]]:
            if held is None or int(held) != instance:
                return False, []
            gone = key, keys.placements(verifier_id), keys.instances(verifier_id)
            return True, [("DEL", *gone), ("ZREM", keys.FLEET, verifier_id)]

        left = await self._store.change("deregister", [key], [("HGET", key, "instance")], decide)
        self._read_at = -math.inf
        return left

    async def fleet(self) -> dict[str, Target]:
        """Return the target of each verifier with a valid lease, by id, in order."""
        begun = time.monotonic()
        [ids] = await self._store.call("fleet", [("ZRANGE", keys.FLEET, 0, -1)])
        targets = await self._store.call("fleet", [("HGET", keys.verifier(name), "target") for name in sorted(ids)])
        found = zip(sorted(ids), targets, strict=True)  # a record is gone with its lease
        read = {name: redis_codec.target_from(text, name) for name, text in found if text}
        self._fleet = {name: target for name, target in read.items() if target is not None}
        self._read_at = begun
        return self._fleet

    async def fleet_within(self, age_s: float) -> dict[str, Target]:
        """Return the fleet as it was at most so many seconds ago, the same value until then."""
        async with self._reading:
            return await self.fleet() if time.monotonic() - self._read_at > age_s else self._fleet

    async def lost(self) -> dict[str, float]:
        """Return the seconds since the leases of verifiers ended that did not leave in order, by id."""
        fleet, time = await self._store.call("lost", [("ZRANGE", keys.FLEET, 0, -1, "WITHSCORES"), ("TIME",)])
        now_ms = milliseconds(time)
        return {name: (now_ms - end_ms) / 1000 for name, end_ms in scored(fleet) if end_ms < now_ms}

    async def find(self, ids: Sequence[str] | None = None) -> list[pb.VerifierStatus]:
        """Return the verifiers of these ids that have a valid lease; None asks for all."""
        fleet = await self.fleet()
        asked = [name for name in (fleet if ids is None else ids) if name in fleet]
        commands = [
            command
            for one in asked
            for command in (
                ("HGETALL", keys.verifier(one)),
                ("PTTL", keys.verifier(one)),
                ("EXISTS", keys.cordon(one)),
                ("GET", keys.instances(one)),
            )
        ]
        replies = await self._store.call("verifiers", commands)
        found = zip(asked, *(replies[part::4] for part in range(4)), strict=True)
        return [redis_codec.verifier_status(name, record, *others) for name, record, *others in found if record]

    async def update(self, verifier_id: str, action: str, *, keep_ms: int) -> bool:
        """Cordon, uncordon or drain a verifier (`action`). Return False if no verifier or cordon has this id.

        A cordon holds for the verifier's id, whatever registers under it; a drain is for the instance that is
        registered now. keep_ms: milliseconds for which the cordon is kept after the last report.
        """
        cordon = keys.cordon(verifier_id)

        def decide(instance: str | None, known: str | None) -> tuple[bool, list[Command]]:
            if action == "uncordon":
                return instance is not None or known is not None, [("DEL", cordon)]
            if instance is None:
                return False, []
            stands = instance if action == "drain" else known or ""  # a drain stands
            return True, [("SET", cordon, stands, "PX", keep_ms)]

        reads = [("HGET", keys.verifier(verifier_id), "instance"), ("GET", cordon)]
        return await self._store.change("update_verifier", [cordon], reads, decide)
