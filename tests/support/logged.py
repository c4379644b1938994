"""Find the errors that a test has logged."""

from __future__ import annotations

import logging

import pytest


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of errors and of tracebacks, without those of grpc.aio about event loops of earlier tests.

    grpc.aio has one queue of events for all loops of a process. An event may come after its own loop has been closed;
    whichever loop takes it, here the running test's, then logs an error.
    """
    records = (record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info)
    return [record.getMessage() for record in records if not _of_a_closed_loop(record)]


def _of_a_closed_loop(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return closed and "PollerCompletionQueue._handle_events" in record.getMessage()
