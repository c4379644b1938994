"""Keep the round trip between this device and its cluster, by which every answer is waited for."""

from __future__ import annotations

ROUND_TRIPS = 4
"""Round trips until a call's answer: TCP, TLS, the settings of HTTP/2, and the call itself."""
MAX_RTT_S = 10.0
BYTES_PER_S = 10_000
"""What an uplink carries at least."""


class RoundTrip:
    """The round trip that the last heartbeat has shown, 0 before the first one.

    A device keeps one for all its peers, since the slow part of the way is mostly its own: a satellite, a congested
    cell. So a dead peer is left soon, and a slow network is waited for.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def measured(self, seconds: float) -> None:
        """Take what a heartbeat has measured."""
        self._seconds = min(seconds, MAX_RTT_S)

    def timeout(self, base_s: float, size: int = 0) -> float:
        """Return the seconds to wait for an answer that takes less than `base_s` where the network is fast.

        size: bytes that are sent before it.
        """
        return base_s + ROUND_TRIPS * self._seconds + size / BYTES_PER_S
