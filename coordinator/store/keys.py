"""Name every Redis key. One hash tag keeps them in one slot, so that the scripts also run on a Redis cluster."""

from __future__ import annotations

from coordinator.records import WorkloadKey

PREFIX = "{outrider}:v1:"

FLEET = PREFIX + "fleet"
"""ZSET verifier id -> end of its lease (ms of Redis TIME)."""

COORDINATORS = PREFIX + "coordinators"
"""ZSET id of a coordinator's process -> end of its lease (ms of Redis TIME)."""

PUBLIC_KEYS = PREFIX + "public-keys"
"""ZSET "key id:hex of the raw key" -> last time that a coordinator vouched for it (ms of Redis TIME)."""

PUBLIC_KEY_PROOFS = PREFIX + "public-key-proofs"
"""HASH "key id:hex of the raw key" -> HMAC by the cluster's key, by which coordinators know each other's keys."""

REVOKED_KEYS = PREFIX + "revoked-keys"
"""ZSET id of a coordinator's key -> when it was revoked (ms of Redis TIME). Does not expire; the oldest go."""

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

TENANT_PLACES = PREFIX + "tenant-places:"
"""Followed by a tenant: ZSET session id -> end of its place on whatever verifier (ms of Redis TIME)."""

EXHAUSTED = PREFIX + "exhausted"
"""ZSET tenant that has had more tokens generated than its limit -> time when it may open sessions again (ms of Redis
TIME). It expires after the longest time for which it can be."""

WAITING = PREFIX + "waiting:"
"""Followed by the weights hash of a target: ZSET tenant that was refused a place there -> time until which it is taken
to wait for one (ms of Redis TIME). It expires then."""

RELEASES = PREFIX + "releases"
"""HASH key of a track (weights hash of a target, for a store with a line's end and the tenant) -> its releases with
their history, JSON. Does not expire."""

RELEASE_SERIAL = PREFIX + "release-serial"
"""STRING: grows whenever any release changes its state; starts from the clock (us), so that it grows even if lost."""


def verifier(verifier_id: str) -> str:
    """Return the key of a HASH, which has a verifier's registration and last telemetry and expires with its lease."""
    return f"{PREFIX}verifier:{verifier_id}"


def placements(verifier_id: str) -> str:
    """Return the key of the ZSET session id -> end of its placement (ms of Redis TIME), counted as used capacity."""
    return f"{PREFIX}placements:{verifier_id}"


def cordon(verifier_id: str) -> str:
    """Return the key of a STRING: an operator wants no new sessions on this verifier. It is the instance that shall
    drain, or empty; it outlives leases and instances, and expires a while after the last report."""
    return f"{PREFIX}cordon:{verifier_id}"


def session(session_id: str) -> str:
    """Return the key of a HASH, which has a session's tenant, workload, placement, last epoch and last report (ms of
    Redis TIME); it expires soon if no report has named it."""
    return f"{PREFIX}session:{session_id}"


def closed(session_id: str) -> str:
    """Return the key of a STRING. "1": its device has closed the session; kept as long as its tickets are valid.
    "killed": an operator has ended it; kept as long as one of its tickets proves ownership."""
    return f"{PREFIX}closed:{session_id}"


def counted(verifier_id: str) -> str:
    """Return the key of a STRING: instance and number of the last batch of tokens that a verifier's reports have told.
    It outlives leases, and expires when tokens of then count no longer."""
    return f"{PREFIX}counted:{verifier_id}"


def tenant_use(tenant: str) -> str:
    """Return the key of a HASH, which has what a tenant has opened and generated, and when that was brought up to
    date; it expires after the longest time for which it can keep sessions from being opened."""
    return f"{PREFIX}tenant-use:{tenant}"


def tenant_places(tenant: str) -> str:
    return TENANT_PLACES + tenant


def telemetry(session_id: str) -> str:
    """Return the key of a HASH, which has a session's last report; it expires soon after the reports stop."""
    return f"{PREFIX}telemetry:{session_id}"


def prior(workload: WorkloadKey) -> str:
    """Return the key of a HASH, which has measurements of sessions with one workload key, and outlives them a while.

    The key belongs to one tenant, so one tenant's labels and acceptance never affect another tenant. Only the
    last part may hold colons, so that no two workload keys share a Redis key.
    """
    return f"{PREFIX}prior:{workload.tenant}:{workload.draft}:{workload.traffic}:{workload.weights}"


def windows(verifier_id: str) -> str:
    """Return the key of a HASH, which has the last decisions on the windows of a verifier's sessions, JSON, who made
    them, from a report of when, and until when nobody else may; it expires soon after reports stop."""
    return f"{PREFIX}windows:{verifier_id}"


def handed(coordinator_id: str) -> str:
    """Return the key of the HASH verifier id -> its last report, JSON, that another coordinator has received and this
    one is to decide from; it expires soon if it is not taken."""
    return f"{PREFIX}handed:{coordinator_id}"


def bounds(session_id: str) -> str:
    """Return the key of a STRING: an operator's bounds of a session's window, JSON; kept as long as a session's record.
    "" stands for every other session, and does not expire."""
    return f"{PREFIX}bounds:{session_id}"


def samples(track: str, version: int) -> str:
    """Return the key of a LIST, which has samples of a canary and of the release it is compared with, the oldest
    first, and expires after them."""
    return f"{PREFIX}samples:{version}:{track}"


def sampled(track: str, version: int) -> str:
    """Return the key of the HASH "arm:tenant" -> samples of a trial, "arm" -> those of all, "tenants" -> number of
    tenants; it expires with them."""
    return f"{PREFIX}sampled:{version}:{track}"


def span(session_id: str, *, store: bool = False) -> str:
    """Return the key of a HASH: a session's counts as the span began that a draft's trial samples, or a store's. It
    expires soon after the reports stop, later than a session takes to resume on another verifier."""
    return f"{PREFIX}{'store-span' if store else 'span'}:{session_id}"
