"""Keep verifiers: their registration and lease, their telemetry, and what operators want of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.config import CoordinatorConfig
from coordinator.records import ReportReply, VerifierRegistration, VerifierStatus, WorkloadKey
from coordinator.store import keys, quotas, redis_codec, revocations
from coordinator.store.redis_store import SESSIONS_AT_ONCE, RedisStore
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry

REPORTED_POSITIONS = 256
"""Positions that a report's acceptance history holds at most (outrider.core.acceptance.history)."""
PRIOR_POSITIONS = 256
"""Positions kept of a workload key: more than decisions are made from, and few enough to be recent."""
PRIOR_MS = 86_400_000
"""A day: a prior without a report since yesterday is measured anew."""
_NO_WORKLOAD = WorkloadKey("", "", "", "")
"""Stands where the script wants a key and nothing is kept."""


class VerifierStore:
    """Reads and writes the verifiers in Redis. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def register(self, registration: VerifierRegistration, lease_ms: int) -> bool:
        """Start a lease. Return True if it replaced a live instance of the same id."""
        fields = redis_codec.registration_fields(registration)
        arguments = [registration.verifier_id, registration.instance, lease_ms, *fields]
        return bool(await self._store.run("register", _lease_keys(registration.verifier_id), arguments))

    async def report(
        self,
        verifier_id: str,
        instance: int,
        verifier: VerifierTelemetry,
        sessions: Sequence[SessionTelemetry],
        tokens: Mapping[str, int],
        seen: int,
        config: CoordinatorConfig,
        *,
        sequence: int = 0,
    ) -> ReportReply | None:
        """Renew the lease and the sessions' placements, and keep the telemetry. Return None if the lease is lost.

        tokens: a batch of those generated, by tenant. sequence: its number, by which it counts once. seen: the last
        revocation that the verifier knows.
        """
        lease_ms, limits = config.lease_ms, config.tenant_limits
        fields = redis_codec.verifier_telemetry_fields(verifier)
        ids = [session.session_id for session in sessions]
        tenants = sorted({*tokens, *(session.tenant for session in sessions)} - {""})
        arguments = [verifier_id, instance, lease_ms, seen, revocations.AT_ONCE, config.session_ms]
        arguments += [
            limits.opens_per_minute,
            limits.tokens_per_minute,
            quotas.USE_MS,
            len(tenants),
            len(fields),
            keys.WAITING,
            sequence,
        ]
        arguments += [*fields, *(part for name in tenants for part in (name, tokens.get(name, 0)))]
        number = {name: i + 1 for i, name in enumerate(tenants)}
        arguments += [part for one in sessions for part in (one.session_id, number.get(one.tenant, 0))]
        touched = [*_lease_keys(verifier_id), keys.cordon(verifier_id), keys.REVOKED]
        touched += [keys.TENANT_LIMITS, keys.EXHAUSTED, keys.counted(verifier_id)]
        touched += [key(name) for name in tenants for key in (keys.tenant_use, keys.tenant_places)]
        touched += [key(session_id) for session_id in ids for key in (keys.closed, keys.session)]
        known, *found = await self._store.run("report", touched, arguments)
        if not known:
            return None
        drain, closed, written_revocations, facts, now_ms, contended, exhausted = found
        workloads = redis_codec.workloads(ids, facts, [session.draft_release for session in sessions])
        for start in range(0, len(sessions), SESSIONS_AT_ONCE):
            written: list[Any] = [verifier_id, 2 * lease_ms, REPORTED_POSITIONS, PRIOR_POSITIONS, PRIOR_MS]
            touched = []
            for s in sessions[start : start + SESSIONS_AT_ONCE]:
                workload = workloads.get(s.session_id)
                # A digit for each position. What a lossy rule accepts is no prior for others.
                history = "".join(map(str, s.acceptance_history)) if workload and not s.lossy else ""
                written += [f"{s.epoch:020d}", redis_codec.session_bytes(s), s.committed, history]
                written += [s.draft_ms, s.nodes_per_level]
                prior_key = keys.prior(workload or _NO_WORKLOAD)
                touched += [keys.telemetry(s.session_id), keys.closed(s.session_id), prior_key]
            await self._store.run("record_telemetry", touched, written)
        revoked, last = revocations.from_reply(written_revocations, seen, config.ticket_ms)
        return ReportReply(
            workloads,
            closed=tuple(closed),
            revoked=revoked,
            seen=last,
            drain=bool(drain),
            store_unix=int(now_ms) / 1000,
            contended=bool(contended),
            exhausted=tuple(exhausted),
            device_ids=redis_codec.device_ids(ids, facts),
        )

    async def deregister(self, verifier_id: str, instance: int) -> bool:
        """End the lease. Return False if this instance does not hold it."""
        return bool(await self._store.run("deregister", _lease_keys(verifier_id), [verifier_id, instance]))

    async def ids(self) -> list[str]:
        """Return the ids of all verifiers with a valid lease, in order."""
        return sorted(await self._store.run("live_verifiers", [keys.FLEET], []))

    async def find(self, ids: Sequence[str] | None = None) -> list[VerifierStatus]:
        """Return the verifiers of these ids that have a valid lease; None asks for all."""
        asked = await self.ids() if ids is None else ids
        commands = [
            command
            for verifier_id in asked
            for command in (
                ("HGETALL", keys.verifier(verifier_id)),
                ("PTTL", keys.verifier(verifier_id)),
                ("EXISTS", keys.cordon(verifier_id)),
            )
        ]
        replies = await self._store.call("verifiers", commands)
        found = zip(asked, replies[::3], replies[1::3], replies[2::3], strict=True)
        return [
            redis_codec.verifier_status(verifier_id, record, ttl_ms, cordon)
            for verifier_id, record, ttl_ms, cordon in found
            if record
        ]

    async def update(self, verifier_id: str, action: str, *, keep_ms: int) -> bool:
        """Cordon, uncordon or drain a verifier (`action`). Return False if no verifier or cordon has this id."""
        touched = [keys.verifier(verifier_id), keys.cordon(verifier_id)]
        return bool(await self._store.run("update_verifier", touched, [action, keep_ms]))


def _lease_keys(verifier_id: str) -> list[str]:
    return [keys.verifier(verifier_id), keys.placements(verifier_id), keys.FLEET]
