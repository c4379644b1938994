"""Remember what outlives a session: its epoch, and tokens that its device may not have."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocol.messages import Attach

KEPT_S = 600.0
"""Seconds for which tokens are kept that a device may not have. One that comes later has them computed again."""
MAX_SESSIONS = 65_536
"""The most ended sessions whose greatest epoch is remembered."""
MAX_TOKENS = 4_000_000
"""The most tokens of ended sessions that are kept, for devices that have not received them; 4 bytes each."""


def fingerprint(attach: Attach, salt: str = "") -> bytes:
    """Return equal digests for attaches that ask for the same sequence under the same salt, the tenant's.

    The epoch and what was received make no difference.
    """
    request = Attach()
    request.CopyFrom(attach)
    for name in ("epoch", "tokens", "scored"):
        request.ClearField(name)
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    return hashlib.blake2b(request.SerializeToString(deterministic=True), key=key, digest_size=16).digest()


class SessionHistory:
    """Keeps epochs of sessions, and for some minutes their committed tokens; those that were seen longest ago are
    forgotten first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._kept: OrderedDict[str, tuple[float, bytes, NDArray[np.int32]]] = OrderedDict()
        """session id -> when its tokens were kept, the fingerprint of their request, and the tokens; the earliest
        first"""
        self._tokens = 0
        """Of all sessions in `_kept`."""
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
            self._forget_tokens(forgotten)

    def keep(self, session_id: str, request: bytes, committed: list[int]) -> None:
        """Remember committed tokens, in case the device attaches again without all of them."""
        self._forget_tokens(session_id)
        now = self._clock()
        self._kept[session_id] = (now, request, np.asarray(committed, dtype=np.int32))
        self._tokens += len(committed)
        while self._kept and (self._tokens > MAX_TOKENS or next(iter(self._kept.values()))[0] < now - KEPT_S):
            self._forget_tokens(next(iter(self._kept)))

    def kept(self, session_id: str, request: bytes) -> list[int]:
        """Return the tokens committed for the same request; [] if there are none."""
        if session_id not in self._kept:
            return []
        _, known, committed = self._kept[session_id]
        return committed.tolist() if known == request else []

    def _forget_tokens(self, session_id: str) -> None:
        if session_id in self._kept:
            _, _, committed = self._kept.pop(session_id)
            self._tokens -= len(committed)
