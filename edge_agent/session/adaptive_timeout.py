"""Scale timeouts by what the network between this device and the cluster has shown."""

from __future__ import annotations

ROUND_TRIPS = 4
"""Round trips until a call's answer: TCP, TLS, the settings of HTTP/2, and the call itself."""
PATIENT = 6.0
"""By how much the second wait is longer than the first where the network may be slow."""
MAX_LEVEL = 3
MOST_PATIENT_S = 20.0
MAX_RTT_S = 10.0
NEAR_S = 1.0
"""An answer that takes less shows that the network is fast."""
BYTES_PER_S, SLOW_BYTES_PER_S = 50_000, 4_000
"""What an uplink carries at least, usually and once a wait was too short."""


class AdaptiveTimeout:
    """Grows timeouts with the round trip, and after one that has expired.

    A device keeps one for all its peers, since the slow part of the way is mostly its own: a satellite, a congested
    cell. Where nothing is known yet, the first try is short, so that a dead peer is left soon, and the next one long.
    Where the last answer was fast, waits double, since a peer is dead more likely than the network slow.
    """

    def __init__(self) -> None:
        self._rtt_s = self._answer_s = 0.0
        self._near = False
        self._level = 0
        """Waits, each longer than the one before, that have expired since the last answer."""

    def of(self, base_s: float) -> float:
        """Return the seconds to wait for an answer that takes less than `base_s` where the network is fast."""
        usual_s = base_s + max(ROUND_TRIPS * self._rtt_s, self._answer_s)
        if not self._level:
            return usual_s
        factor = 2.0**self._level if self._near else PATIENT
        return max(usual_s, min(factor * base_s, MOST_PATIENT_S))

    def of_bytes(self, size: int) -> float:
        """Return the seconds that an uplink takes for so many bytes, at most."""
        return size / (SLOW_BYTES_PER_S if self._level else BYTES_PER_S)

    def expired(self, base_s: float, waited_s: float) -> None:
        """Note that no answer came within `waited_s`. Of many calls that have waited together, one counts."""
        if waited_s >= self.of(base_s):
            self._level = min(self._level + 1, MAX_LEVEL)

    def answered(self, after_s: float) -> None:
        """Note that an answer has come in time. Until a round trip is measured, one that took long tells of it."""
        self._level, self._near = 0, after_s < NEAR_S
        self._answer_s = 0.0 if self._near or self._rtt_s else min(after_s, MOST_PATIENT_S)

    def measured(self, rtt_s: float) -> None:
        """Take the round trip that was measured last, in seconds."""
        self._rtt_s, self._answer_s = min(rtt_s, MAX_RTT_S), 0.0
