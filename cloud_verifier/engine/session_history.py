"""Remember what outlives a session: its epoch, tokens that its device may not have, and its tenant's acceptance."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.core.acceptance.node_acceptance import EXPECTED, NodeAcceptance
from outrider.core.protocol.messages import Attach

KEPT_S = 600.0
"""Seconds for which tokens are kept that a device may not have. One that comes later has them computed again."""
MAX_SESSIONS = 65_536
"""The most ended sessions whose greatest epoch is remembered."""
MAX_TOKENS = 4_000_000
"""The most tokens of ended sessions that are kept, for devices that have not received them; 4 bytes each."""
Fingerprint = bytes


def fingerprint(attach: Attach, salt: str = "") -> Fingerprint:
    """Return equal digests for attaches that ask for the same sequence under the same salt, the tenant's.

    The epoch and what was received make no difference.
    """
    request = Attach()
    request.CopyFrom(attach)
    for name in ("epoch", "tokens", "scored"):
        request.ClearField(name)
    return hashlib.blake2b(request.SerializeToString(deterministic=True), key=_key(salt), digest_size=16).digest()


def _key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=32).digest()


class SessionHistory:
    """Keeps epochs of sessions, and for some minutes their committed tokens; those that were seen longest ago are
    forgotten first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._tails: OrderedDict[str, tuple[float, Fingerprint, NDArray[np.int32]]] = OrderedDict()
        """session id -> when its tokens were kept, for which request, and the tokens; the earliest first"""
        self._tokens = 0
        self._clock = clock

    def epoch(self, session_id: str) -> int:
        """Return the greatest epoch of a session; 0 if it is unknown."""
        return self._epochs.get(session_id, 0)

    def see(self, session_id: str, epoch: int) -> None:
        """Remember that an attach in this epoch was admitted."""
        self._epochs[session_id] = max(epoch, self.epoch(session_id))
        self._epochs.move_to_end(session_id)
        while len(self._epochs) > MAX_SESSIONS:
            forgotten, _ = self._epochs.popitem(last=False)
            self._drop_tail(forgotten)

    def keep(self, session_id: str, request: Fingerprint, committed: list[int]) -> None:
        """Remember committed tokens, in case the device attaches again without all of them."""
        self._drop_tail(session_id)
        if len(committed) > MAX_TOKENS:
            return
        now = self._clock()
        self._tails[session_id] = (now, request, np.asarray(committed, dtype=np.int32))
        self._tokens += len(committed)
        while self._tokens > MAX_TOKENS or next(iter(self._tails.values()))[0] < now - KEPT_S:
            self._drop_tail(next(iter(self._tails)))

    def kept(self, session_id: str, request: Fingerprint) -> list[int]:
        """Return the tokens committed for the same request; [] if there are none."""
        _, known, committed = self._tails.get(session_id, (0.0, b"", None))
        return committed.tolist() if committed is not None and known == request else []

    def _drop_tail(self, session_id: str) -> None:
        _, _, committed = self._tails.pop(session_id, (0.0, b"", ()))
        self._tokens -= len(committed)


def tenant_acceptance(expected: Sequence[Sequence[float]] = EXPECTED) -> Callable[[str], NodeAcceptance]:
    """Return a function that gives each tenant's estimate of node acceptance; that of all tenants is its prior.

    A new session of the tenant starts from it, and it learns from the session. The tenant that has begun no session for
    longest is forgotten first. expected: as for NodeAcceptance.
    """
    everyone = NodeAcceptance(expected=expected)
    return lru_cache(1024)(lambda tenant: NodeAcceptance(everyone, shared=True))
