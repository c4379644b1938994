"""Create a verifier's traffic recorder as its settings say, and keep its log tidy. Needs pyarrow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic.recorder import TrafficRecorder
from cloud_verifier.traffic.redaction import load
from cloud_verifier.traffic.segments import SegmentLog, SegmentWriter
from outrider.core.errors import BadRequest

log = logging.getLogger(__name__)

TIDY_EVERY_S = 300.0
"""Seconds between two rounds: an expired row is never read, and is deleted after so long at the latest."""
MANY = 16
"""Small segments of a day from which on they are merged."""


def recorder_of(config: VerifierConfig, verifier_id: str) -> TrafficRecorder:
    """Return a recorder that writes to `config.traffic`, and tidies the log there until it is closed.

    Raises BadRequest if there can be no log or no redaction hook, and ImportError if fsspec lacks a package.
    """
    redact = load(config.traffic_redact) if config.traffic_redact else None
    try:
        segments = SegmentLog(config.traffic)
        writer = SegmentWriter(config.traffic, verifier_id=verifier_id)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"traffic is {config.traffic!r}, where nothing can be written: {error}", field="traffic"
        ) from error
    return TrafficRecorder(
        writer,
        redact=redact,
        flush_s=config.traffic_flush_s,
        flush_tokens=config.traffic_flush_tokens,
        prompt_tokens=config.traffic_prompt_tokens,
        on_close=keep_tidy(segments, config.traffic_max_bytes),
    )


def keep_tidy(segments: SegmentLog, max_bytes: int, interval_s: float = TIDY_EVERY_S) -> Callable[[], None]:
    """Tidy a log now and every `interval_s` seconds, in a thread, so that no writing waits; return what stops it.

    A round under way is left to itself: it can end at any moment without harm.
    """
    stop = Event()

    def work() -> None:
        while True:
            try:
                _tidy(segments, max_bytes)
            except Exception as error:
                log.warning("the traffic log could not be tidied: %r", error)
            if stop.wait(interval_s):
                return

    Thread(target=work, name="traffic-tidy", daemon=True).start()
    return stop.set


def _tidy(segments: SegmentLog, max_bytes: int) -> None:
    """Delete expired rows, merge small segments, and keep the log below `max_bytes`. Raises OSError."""
    segments.expire()
    segments.compact(at_least=MANY)
    if deleted := segments.shrink(max_bytes):
        log.warning("%d of the oldest segments went, to keep the traffic log below %d bytes", deleted, max_bytes)
