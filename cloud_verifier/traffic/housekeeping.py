"""Keeps a traffic log in order while it grows: expired rows go, small segments are merged, the oldest make room."""

from __future__ import annotations

import logging
from threading import Event, Thread

from cloud_verifier.traffic.segments import SegmentLog

log = logging.getLogger(__name__)

INTERVAL_S = 300.0
"""Between two rounds: an expired row is never read, and is deleted after so long at the latest."""
MANY = 16
"""Small segments that are worth merging."""


class Housekeeper:
    """A thread of its own, so that what is recorded does not wait to be written while it reads and merges."""

    def __init__(self, segments: SegmentLog, most_bytes: int, interval_s: float = INTERVAL_S) -> None:
        """most_bytes: the log is kept below; the oldest segments go."""
        self._segments = segments
        self._most_bytes = most_bytes
        self._interval_s = interval_s
        self._stop = Event()
        self._thread = Thread(target=self._work, name="traffic-housekeeping", daemon=True)
        self._thread.start()

    def tidy(self) -> None:
        """One round. Raises OSError."""
        self._segments.expire()
        self._segments.compact(at_least=MANY)
        gone = self._segments.shrink(self._most_bytes)
        if gone:
            log.warning(
                "%d of the oldest segments went, to keep the traffic log below %d bytes", gone, self._most_bytes
            )

    def close(self) -> None:
        """A round that has begun is left to itself: it can end at any moment without harm."""
        self._stop.set()

    def _work(self) -> None:
        while True:
            try:
                self.tidy()
            except Exception as error:
                log.warning("the traffic log could not be tidied: %r", error)
            if self._stop.wait(self._interval_s):
                return
