"""Scale timeouts by what the network between this device and the cluster has shown."""

from __future__ import annotations

ROUND_TRIPS = 4
"""Round trips until a call's answer: TCP, TLS, the settings of HTTP/2, and the call itself."""
PATIENT = 6.0
MOST_PATIENT_S = 20.0
MAX_RTT_S = 10.0


class AdaptiveTimeout:
    """Grows timeouts with the round trip, and after one that has expired.

    A device keeps one for all its peers, since the slow part of the way is mostly its own: a satellite, a congested
    cell. Where nothing is known yet, the first try is short, so that a dead peer is left soon, and the next one long.
    """

    def __init__(self) -> None:
        self._rtt_s = 0.0
        self._expired = False

    def of(self, base_s: float) -> float:
        """Return the seconds to wait for an answer that takes less than `base_s` where the network is fast."""
        usual_s = base_s + ROUND_TRIPS * self._rtt_s
        return max(usual_s, min(PATIENT * base_s, MOST_PATIENT_S)) if self._expired else usual_s

    def expired(self) -> None:
        """Note that an answer did not come in time."""
        self._expired = True

    def answered(self) -> None:
        """Note that an answer has come in time."""
        self._expired = False

    def measured(self, rtt_s: float) -> None:
        """Take the round trip that was measured last, in seconds."""
        self._rtt_s = min(rtt_s, MAX_RTT_S)
