"""Name every Redis key.

A key's hash tag, in braces, says in which slot of a Redis Cluster it is. All that belongs to one target has one tag, so
that scripts can place a session, or take a report, in one step; targets are spread. A tenant, whose sessions may be of
any target, has another one. What is small, changes seldom and holds for the whole cluster has
`{outrider}`. A script touches keys of one tag alone.
"""

from __future__ import annotations

import functools
import hashlib

from coordinator.records import WorkloadKey

PREFIX = "{outrider}:v1:"

TARGETS = PREFIX + "targets"
"""ZSET weights hash of a target -> when a verifier of it has registered last (s of a coordinator's clock). The oldest
go."""

REVOKED = PREFIX + "revoked"
"""ZSET a Revocation as `written` -> when it was ordered (us of Redis TIME, no two the same). Entries go when the last
ticket that they end has expired."""

TENANTS = PREFIX + "tenants"
"""HASH name -> "when created, when revoked (ms of Redis TIME, 0: not revoked), hash of the key ("": revoked)", of every
tenant that an operator has created. Does not expire."""

TENANT_KEYS = PREFIX + "tenant-keys"
"""HASH hash of a key (SHA-256, hex) -> name of its tenant. Does not expire."""

TENANT_LIMITS = PREFIX + "tenant-limits"
"""HASH name of a tenant -> the limits that an operator has set (coordinator.store.quotas). Does not expire."""

EXHAUSTED = PREFIX + "exhausted"
"""ZSET tenant that has had more tokens generated than its limit -> time when it may open sessions again (ms of Redis
TIME). It expires after the longest time for which it can be."""

BOUNDS = PREFIX + "bounds"
"""STRING: an operator's bounds of the window of every session without bounds of its own, JSON. Does not expire."""

RELEASES = PREFIX + "releases"
"""HASH weights hash of a target -> the releases of its drafts with their history, JSON. Does not expire."""

RELEASE_SERIAL = PREFIX + "release-serial"
"""STRING: grows whenever any release changes its state; starts from the clock (us), so that it grows even if lost."""


@functools.lru_cache(maxsize=1_024)
def of_target(weights: str) -> str:
    """Return how the keys of a target begin; its hash is hashed since it may hold braces."""
    return f"{{outrider:target:{hashlib.blake2b(weights.encode(), digest_size=10).hexdigest()}}}:v2:"


def fleet(weights: str) -> str:
    """Return the key of the ZSET verifier id -> end of its lease (ms of Redis TIME), of a target's verifiers."""
    return of_target(weights) + "fleet"


def identities(weights: str) -> str:
    """Return the key of the HASH verifier id -> identity of its target, JSON, of the verifiers of the fleet."""
    return of_target(weights) + "identities"


def waiting(weights: str) -> str:
    """Return the key of the ZSET tenant that was refused a place at a target -> time until which it is taken to wait
    for one (ms of Redis TIME). It expires then."""
    return of_target(weights) + "waiting"


def tenant_places(weights: str, tenant: str) -> str:
    """Return the key of the ZSET session id -> end of its place on whatever verifier of the target (ms of Redis TIME),
    of a tenant's sessions."""
    return f"{of_target(weights)}tenant-places:{tenant}"


def verifier(weights: str, verifier_id: str) -> str:
    """Return the key of a HASH, which has a verifier's registration and last telemetry and expires with its lease."""
    return f"{of_target(weights)}verifier:{verifier_id}"


def placements(weights: str, verifier_id: str) -> str:
    """Return the key of the ZSET session id -> end of its placement (ms of Redis TIME), counted as used capacity."""
    return f"{of_target(weights)}placements:{verifier_id}"


def cordon(weights: str, verifier_id: str) -> str:
    """Return the key of a STRING: an operator wants no new sessions on this verifier. It is the instance that shall
    drain, or empty; it outlives leases and instances, and expires a while after the last report."""
    return f"{of_target(weights)}cordon:{verifier_id}"


def counted(weights: str, verifier_id: str) -> str:
    """Return the key of a STRING: instance and number of the last batch of tokens that a verifier's reports have told.
    It outlives leases, and expires when tokens of then count no longer."""
    return f"{of_target(weights)}counted:{verifier_id}"


def telemetry(weights: str, verifier_id: str) -> str:
    """Return the key of the HASH session id -> its last report, of the sessions that a verifier has reported (see
    `lua/record_telemetry.lua`); it expires soon after the reports stop."""
    return f"{of_target(weights)}telemetry:{verifier_id}"


def windows(weights: str, verifier_id: str) -> str:
    """Return the key of a STRING: the last decisions on the windows of a verifier's sessions, JSON; it expires soon
    after reports stop."""
    return f"{of_target(weights)}windows:{verifier_id}"


def session(weights: str, session_id: str) -> str:
    """Return the key of a HASH, which has a session's tenant, workload, placement, last epoch, bounds of its window by
    an operator, and who has reported it last and when, to some seconds (ms of Redis TIME); it expires soon if no report
    has named it.

    Of one that is over it has how it ended alone. "closed", by its device: kept as long as its tickets are valid.
    "killed", by an operator: kept as long as one of them proves ownership.
    """
    return f"{of_target(weights)}session:{session_id}"


def prior(workload: WorkloadKey) -> str:
    """Return the key of a HASH, which has measurements of sessions with one workload key, and outlives them a while.

    The key belongs to one tenant, so one tenant's labels and acceptance never affect another tenant. No part may hold
    colons, so that no two workload keys share a Redis key.
    """
    return f"{of_target(workload.weights)}prior:{workload.tenant}:{workload.draft}:{workload.traffic}"


def samples(weights: str, version: int) -> str:
    """Return the key of the HASH "arm:tenant" -> "number of samples, sum of their acceptances, sum of the squares" of a
    canary's trial. It expires a while after the last sample."""
    return f"{of_target(weights)}samples:{version}"


def span(weights: str, session_id: str) -> str:
    """Return the key of a HASH: a session's counts as the span began that a draft's trial samples. It expires soon
    after the reports stop, later than a session takes to resume on another verifier."""
    return f"{of_target(weights)}span:{session_id}"


def tenant_use(tenant: str) -> str:
    """Return the key of a HASH, which has what a tenant has opened and generated, and when that was brought up to
    date; it expires after the longest time for which it can keep sessions from being opened."""
    return f"{{outrider:tenant:{tenant}}}:v2:use"
