"""Which devices are in a canary."""

from __future__ import annotations

import hashlib


def drawn(device_id: str, release: str, share: float) -> bool:
    """Whether this device belongs to the share that tries this release. Nobody without a name does.

    A matter of the two names alone: the same at every coordinator and at every asking; another release draws anew, so
    that no device is always first; a greater share keeps those that were drawn.
    """
    if not device_id:
        return False
    digest = hashlib.sha256(f"{release}:{device_id}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
