"""Scale timeouts by what the network between this device and the cluster has shown."""

from __future__ import annotations

ROUND_TRIPS = 4
"""Round trips until a call's answer: TCP, TLS, the settings of HTTP/2, and the call itself."""
MAX_DOUBLINGS = 3
MOST_PATIENT_S = 20.0
"""Longest wait that doubling makes of a shorter one."""
MAX_RTT_S = 10.0
BYTES_PER_S, SLOW_BYTES_PER_S = 50_000, 4_000
"""What an uplink carries at least, usually and once a wait was too short."""


class AdaptiveTimeout:
    """Adds four round trips to every timeout, and doubles it after each one that has expired, until an answer comes.

    A device keeps one for all its peers, since the slow part of the way is mostly its own: a satellite, a congested
    cell. So a dead peer is left soon, and a slow network is waited for at the next try.
    """

    def __init__(self) -> None:
        self._rtt_s = 0.0
        self._expired = 0
        """Waits, each longer than the one before, that have expired since the last answer."""

    def of(self, base_s: float) -> float:
        """Return the seconds to wait for an answer that takes less than `base_s` where the network is fast."""
        usual_s = base_s + ROUND_TRIPS * self._rtt_s
        return max(usual_s, min(usual_s * 2.0**self._expired, MOST_PATIENT_S))

    def of_bytes(self, size: int) -> float:
        """Return the seconds that an uplink takes for so many bytes, at most."""
        return size / (SLOW_BYTES_PER_S if self._expired else BYTES_PER_S)

    def expired(self, base_s: float, waited_s: float) -> None:
        """Note that no answer came within `waited_s`. Of many calls that have waited together, one counts."""
        if waited_s >= self.of(base_s):
            self._expired = min(self._expired + 1, MAX_DOUBLINGS)

    def answered(self) -> None:
        """Note that an answer has come in time."""
        self._expired = 0

    def measured(self, rtt_s: float) -> None:
        """Take the round trip that was measured last, in seconds."""
        self._rtt_s = min(rtt_s, MAX_RTT_S)
