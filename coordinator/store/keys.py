"""Name every Redis key. One hash tag keeps them in one slot, so that the scripts also run on a Redis cluster."""

from __future__ import annotations

from coordinator.records import WorkloadKey

PREFIX = "{outrider}:v1:"

FLEET = PREFIX + "fleet"
"""ZSET verifier id -> end of its lease (ms of Redis TIME)."""

PUBLIC_KEYS = PREFIX + "public-keys"
"""ZSET "key id:hex of the raw key" -> last time that a coordinator vouched for it (ms of Redis TIME)."""

TENANTS = PREFIX + "tenants"
"""HASH name -> "when created, when revoked (ms of Redis TIME, 0: not revoked), hash of the key ("": revoked)", of every
tenant that an operator has created. Does not expire."""

TENANT_KEYS = PREFIX + "tenant-keys"
"""HASH hash of a key (SHA-256, hex) -> name of its tenant. Does not expire."""

RELEASES = PREFIX + "releases"
"""HASH weights hash of a target -> its draft releases with their history, JSON. Does not expire."""

RELEASE_SERIAL = PREFIX + "release-serial"
"""STRING: grows whenever any release changes its state; starts from the clock (us), so that it grows even if lost."""


def verifier(verifier_id: str) -> str:
    """HASH: registration and last telemetry of one verifier; expires with its lease."""
    return f"{PREFIX}verifier:{verifier_id}"


def placements(verifier_id: str) -> str:
    """ZSET session id -> end of its placement (ms of Redis TIME): what counts against the verifier's capacity."""
    return f"{PREFIX}placements:{verifier_id}"


def cordon(verifier_id: str) -> str:
    """STRING: an operator wants no new sessions on this verifier; the instance that shall drain, or empty. It outlives
    leases and instances, and expires a while after the last report."""
    return f"{PREFIX}cordon:{verifier_id}"


def session(session_id: str) -> str:
    """HASH: tenant, workload, placement and last epoch given out of a session; expires."""
    return f"{PREFIX}session:{session_id}"


def closed(session_id: str) -> str:
    """STRING "1": the session was closed a moment ago; a report that was on its way must not bring it back.
    "killed": an operator has ended it; kept as long as one of its tickets proves ownership."""
    return f"{PREFIX}closed:{session_id}"


def telemetry(session_id: str) -> str:
    """HASH: what the session's verifier last reported; expires soon after the reports stop."""
    return f"{PREFIX}telemetry:{session_id}"


def prior(workload: WorkloadKey) -> str:
    """HASH: what was measured of the sessions with one workload key; expires some time after the last of them.

    The key belongs to one tenant: labels and acceptance of its devices are no other tenant's loss. Only the last part
    may hold colons, so that no two workload keys share a Redis key.
    """
    return f"{PREFIX}prior:{workload.tenant}:{workload.draft}:{workload.traffic}:{workload.weights}"


def windows(verifier_id: str) -> str:
    """HASH session id -> the last decision on its window, JSON; expires soon after the reports stop."""
    return f"{PREFIX}windows:{verifier_id}"


def bounds(session_id: str) -> str:
    """STRING: the bounds of a session's window that an operator has set, JSON; kept as long as a session's record. ""
    stands for every other session, and does not expire."""
    return f"{PREFIX}bounds:{session_id}"


def samples(weights: str, version: int) -> str:
    """LIST of samples of a canary and of the release beside it, the oldest first; expires a while after the last."""
    return f"{PREFIX}samples:{version}:{weights}"


def sampled(weights: str, version: int) -> str:
    """HASH "arm:tenant" -> samples of the canary's trial, and "arm" -> samples of all tenants; expires with them."""
    return f"{PREFIX}sampled:{version}:{weights}"


def span(session_id: str) -> str:
    """HASH: a session's counts at the beginning of the span that is being sampled; expires soon after the reports stop,
    later than a session takes to resume on another verifier."""
    return f"{PREFIX}span:{session_id}"
