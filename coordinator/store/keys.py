"""Every Redis key, in one place. One hash tag keeps them in one slot, so that the scripts also run on a cluster."""

from __future__ import annotations

PREFIX = "{outrider}:v1:"

FLEET = PREFIX + "fleet"
"""ZSET verifier id -> end of its lease (ms of Redis TIME)."""

PUBLIC_KEYS = PREFIX + "public-keys"
"""ZSET "key id:hex of the raw key" -> last time that a coordinator vouched for it (ms of Redis TIME)."""


def verifier(verifier_id: str) -> str:
    """HASH: registration and last load of one verifier; expires with its lease."""
    return f"{PREFIX}verifier:{verifier_id}"


def seats(verifier_id: str) -> str:
    """ZSET session id -> end of its seat (ms of Redis TIME): what counts against the verifier's capacity."""
    return f"{PREFIX}seats:{verifier_id}"


def cordon(verifier_id: str) -> str:
    """STRING: an operator wants no new sessions on this verifier; the instance that shall drain, or empty. Outlives
    leases and instances; expires a while after the last report."""
    return f"{PREFIX}cordon:{verifier_id}"


def session(session_id: str) -> str:
    """HASH: whose session it is, of what kind, where it was placed, the last epoch given out; expires."""
    return f"{PREFIX}session:{session_id}"


def closed(session_id: str) -> str:
    """STRING "1": the session was closed a moment ago; a report that was on its way then must not bring it back.
    "killed": an operator has ended it; kept as long as one of its tickets proves anything."""
    return f"{PREFIX}closed:{session_id}"


def stats(session_id: str) -> str:
    """HASH: what the verifier that serves the session last reported; expires soon after the reports stop."""
    return f"{PREFIX}stats:{session_id}"


def prior(tenant: str, draft: str, traffic: str, weights: str) -> str:
    """HASH: what was measured of sessions that are alike; expires some time after the last of them.

    Of one tenant alone: what its devices call themselves, and how they guess, is nobody else's loss. Only the last part
    may hold colons, so that no two kinds share a key.
    """
    return f"{PREFIX}prior:{tenant}:{draft}:{traffic}:{weights}"


def windows(verifier_id: str) -> str:
    """HASH session id -> what was decided of its window last, JSON; expires soon after the reports stop."""
    return f"{PREFIX}windows:{verifier_id}"


def bounds(session_id: str) -> str:
    """STRING: what an operator allows a session's window, JSON; kept as long as a session's record. "" is every other
    session, and does not expire."""
    return f"{PREFIX}bounds:{session_id}"


TENANTS = PREFIX + "tenants"
"""HASH name -> "when created, when revoked (ms of Redis TIME, 0: not), hash of the key ("": revoked)", of every tenant
that an operator has created. Does not expire."""

TENANT_KEYS = PREFIX + "tenant-keys"
"""HASH hash of a key (SHA-256, hex) -> name of its tenant. Does not expire."""

RELEASES = PREFIX + "releases"
"""HASH weights hash of a target -> its draft releases and what became of them, JSON. Does not expire."""

RELEASE_SERIAL = PREFIX + "release-serial"
"""STRING: grows whenever any release changes its state; begins at the clock (us), so that it grows even if lost."""


def samples(weights: str, version: int) -> str:
    """LIST of what sessions showed of a canary and of what is beside it, the oldest first; expires a while after it."""
    return f"{PREFIX}samples:{version}:{weights}"


def sampled(weights: str, version: int) -> str:
    """HASH "arm:tenant" -> samples of the canary's trial, and "arm" -> those of all; expires with them."""
    return f"{PREFIX}sampled:{version}:{weights}"


def stretch(session_id: str) -> str:
    """HASH: counts of a session's guesses at the beginning of the stretch that is being sampled; expires soon after the
    reports stop, later than a session takes to resume elsewhere."""
    return f"{PREFIX}stretch:{session_id}"
