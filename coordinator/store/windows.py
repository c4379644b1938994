"""Keep speculation windows: decisions, the bounds that operators set, and the priors that decisions start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.records import Prior, WindowBounds, WindowDecision, WorkloadKey
from coordinator.store import keys, redis_codec
from coordinator.store.redis_store import RedisStore


class WindowStore:
    """The windows in Redis. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def decisions(self, verifier_ids: Sequence[str]) -> dict[str, WindowDecision]:
        """Return the last decision on each session of these verifiers, by session id."""
        replies = await self._store.call("windows", [("HGETALL", keys.windows(name)) for name in verifier_ids])
        decisions = [
            redis_codec.decision_from_json(verifier_id, written)
            for verifier_id, reply in zip(verifier_ids, replies, strict=True)
            for written in reply.values()
        ]
        return {decision.session_id: decision for decision in decisions if decision is not None}

    async def set_decisions(self, verifier_id: str, decisions: Iterable[WindowDecision], *, keep_ms: int) -> None:
        """Replace the decisions on a verifier's sessions."""
        arguments: list[Any] = [keep_ms]
        for decision in decisions:
            arguments += [decision.session_id, redis_codec.to_json(decision)]
        await self._store.run("set_decisions", [keys.windows(verifier_id)], arguments)

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
        command = ("SET", key, redis_codec.to_json(bounds), *expiry) if bounds is not None else ("DEL", key)
        await self._store.call("set_bounds", [command])

    async def priors(self, workloads: Iterable[WorkloadKey]) -> dict[WorkloadKey, Prior]:
        """Return the priors of these workload keys, where anything was measured."""
        asked = list(dict.fromkeys(workloads))
        replies = await self._store.call("priors", [("HGETALL", keys.prior(workload)) for workload in asked])
        return {key: redis_codec.prior_from(record) for key, record in zip(asked, replies, strict=True) if record}
