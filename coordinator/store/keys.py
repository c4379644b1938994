"""Name every Redis key."""

from __future__ import annotations

import hashlib

PREFIX = "outrider:v5:"
"""Its number grows when what is kept under a key changes: bytes of another version are no message of this one."""

FLEET = PREFIX + "fleet"
"""ZSET verifier id -> end of its lease (ms of Redis TIME). One that has ended is kept for an hour."""

REVOKED = PREFIX + "revoked"
"""ZSET "session_id:<id>" or "api_key_id:<id>" -> when it was ordered (us of Redis TIME, no two the same). Entries go
when the last ticket that they end has expired."""

TENANTS = PREFIX + "tenants"
"""HASH name -> pb.Tenant with `key_hash`, of every tenant that an operator has created. Does not expire."""

TENANT_KEYS = PREFIX + "tenant-keys"
"""HASH hash of a key (SHA-256, hex) -> name of its tenant. Does not expire."""

TENANT_LIMITS = PREFIX + "tenant-limits"
"""HASH name of a tenant -> the limits that an operator has set (pb.TenantLimits). Does not expire."""

EXHAUSTED = PREFIX + "exhausted"
"""ZSET tenant that has had more tokens generated than its limit -> time when it may open sessions again (ms of Redis
TIME). It expires after the longest time for which it can be."""

BOUNDS = PREFIX + "bounds"
"""STRING: an operator's bounds of the window of every session without bounds of its own, protobuf. Does not expire."""

RELEASES = PREFIX + "releases"
"""HASH weights hash of a target -> the releases of its drafts with their history (pb.ReleaseTrack). Does not expire."""

RELEASE_SERIAL = PREFIX + "release-serial"
"""STRING: grows with every change of a release; starts from the clock (us), so that it grows even if lost."""


def waiting(target: str) -> str:
    """Return the key of the ZSET tenant that was refused a place at a target of this name -> time until which it is
    taken to wait for one (ms of Redis TIME). It expires then."""
    return f"{PREFIX}waiting:{_digest(target)}"


def tenant_places(tenant: str) -> str:
    """Return the key of the ZSET session id -> end of its place on whatever verifier (ms of Redis TIME), of a tenant's
    sessions."""
    return f"{PREFIX}tenant-places:{tenant}"


def tenant_use(tenant: str) -> str:
    """Return the key of a HASH, which has what a tenant has opened and generated, and when that was brought up to
    date; it expires after the longest time for which it can keep sessions from being opened."""
    return f"{PREFIX}tenant-use:{tenant}"


def verifier(verifier_id: str) -> str:
    """Return the key of a HASH, which expires with a verifier's lease: `instance`, `registration`
    (pb.RegisterRequest), `target` (pb.TargetIdentity), and of its last report `telemetry` (pb.VerifierTelemetry),
    `live` (sessions) and `draining` (0 or 1)."""
    return f"{PREFIX}verifier:{verifier_id}"


def instances(verifier_id: str) -> str:
    """Return the key of a STRING: the last instance of a verifier that did not leave in order, and how many were before
    it. It expires long after it has registered."""
    return f"{PREFIX}instances:{verifier_id}"


def placements(verifier_id: str) -> str:
    """Return the key of the ZSET session id -> end of its placement (ms of Redis TIME), counted as used capacity."""
    return f"{PREFIX}placements:{verifier_id}"


def cordon(verifier_id: str) -> str:
    """Return the key of a STRING: an operator wants no new sessions on this verifier. It is the instance that shall
    drain, or empty; it outlives leases and instances, and expires a while after the last report."""
    return f"{PREFIX}cordon:{verifier_id}"


def counted(verifier_id: str) -> str:
    """Return the key of a STRING: instance and number of the last batch of tokens that a verifier's reports have told.
    It outlives leases, and expires when tokens of then count no longer."""
    return f"{PREFIX}counted:{verifier_id}"


def telemetry(verifier_id: str) -> str:
    """Return the key of a STRING: the sessions of a verifier's last report, without their acceptance histories
    (pb.ReportRequest); it expires soon after the reports stop."""
    return f"{PREFIX}telemetry:{verifier_id}"


def windows(verifier_id: str) -> str:
    """Return the key of a STRING: the last decisions on the windows of a verifier's sessions, protobuf; it expires
    soon after reports stop."""
    return f"{PREFIX}windows:{verifier_id}"


def session(session_id: str) -> str:
    """Return the key of a HASH, which has a session's tenant, workload, placement, last epoch, bounds of its window by
    an operator, and who has reported it last and when, to some seconds (ms of Redis TIME); it expires soon if no report
    has named it.

    Of one that is over it has how it ended alone. "closed", by its device: kept as long as its tickets are valid.
    "killed", by an operator: kept as long as one of them proves ownership.
    """
    return f"{PREFIX}session:{session_id}"


def prior(weights: str, tenant: str, draft: str, traffic: str) -> str:
    """Return the key of a HASH, which has measurements of sessions whose drafts are expected to be accepted alike, and
    outlives them a while.

    It belongs to one tenant, so one tenant's labels and acceptance never affect another tenant. weights: hash of the
    target's. draft: release. traffic: class, which may be empty. Only the hash may hold colons, so that no two
    workloads share a key.
    """
    return f"{PREFIX}prior:{_digest(weights)}:{tenant}:{draft}:{traffic}"


def samples(weights: str, version: int) -> str:
    """Return the key of the HASH of a canary's trial: "arm:tenant:samples" -> their number, "...:total" and
    "...:squares" -> the sums of their acceptances and of the squares. It expires a while after the last sample."""
    return f"{PREFIX}samples:{version}:{_digest(weights)}"


def sampled(session_id: str, version: int, arm: str) -> str:
    """Return the key of a STRING: a session has given its sample to an arm of a canary's trial. It expires when the
    session has too many positions for another one."""
    return f"{PREFIX}sampled:{version}:{arm}:{session_id}"


def _digest(name: str) -> str:
    """Return a short hash of a target's name or of its weights' hash, which may hold any characters."""
    return hashlib.blake2b(name.encode(), digest_size=10).hexdigest()
