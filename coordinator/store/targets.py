"""Find out which target a verifier or a session belongs to, by which Redis has its keys (`coordinator.store.keys`).

Verifiers and operators name neither's target. So every coordinator keeps the verifiers' that it has read or registered
last, in `RedisStore.targets`. What it keeps may be old: a verifier of another target by now is one whose lease is lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from coordinator.store import keys, redis_codec
from coordinator.store.redis_store import RedisStore
from outrider.wire.ticket import Target

MAX_TARGETS = 1_024
"""Targets that are listed. Those with which no verifier has registered for longest go."""


async def known(store: RedisStore) -> list[str]:
    """Return the weights hashes of all targets that verifiers have registered with. Raises Unavailable."""
    [found] = await store.call("targets", [("ZRANGE", keys.TARGETS, 0, -1)])
    return list(map(str, found))


async def add(store: RedisStore, weights: str) -> None:
    """List a target. Raises Unavailable."""
    commands: list[tuple[Any, ...]] = [("ZADD", keys.TARGETS, int(time.time()), weights)]
    await store.call("targets", [*commands, ("ZREMRANGEBYRANK", keys.TARGETS, 0, -1 - MAX_TARGETS)])


async def verifiers(store: RedisStore) -> dict[str, Target]:
    """Return the target of each verifier with a lease, by id, in order. Raises Unavailable."""
    touched = [[keys.fleet(weights), keys.identities(weights)] for weights in await known(store)]
    fleets = await asyncio.gather(*(store.run("live_verifiers", of_target, []) for of_target in touched))
    lines = sorted(line.partition(" ") for fleet in fleets for line in fleet.splitlines())
    store.targets = {name: redis_codec.target_from_json(written) for name, _, written in lines}
    return store.targets


async def of_verifier(store: RedisStore, verifier_id: str) -> str:
    """Return the weights hash of a verifier's target; "" if it has no lease. Raises Unavailable."""
    target = store.targets.get(verifier_id) or (await verifiers(store)).get(verifier_id)
    return target.weights_hash if target else ""


async def of_session(store: RedisStore, session_id: str) -> tuple[str, tuple[str, ...]]:
    """Return the weights hash of a session's target and the verifiers that may serve it: the one that has reported it
    last, then that of its last placement. ("", ()) if nothing is kept of it. Raises Unavailable.
    """
    targets = await known(store)
    commands = [("HMGET", keys.session(weights, session_id), "reporter", "verifier") for weights in targets]
    for weights, names in zip(targets, await store.call("session", commands), strict=True):
        if any(names):
            return weights, tuple(dict.fromkeys(name for name in names if name))
    return "", ()
