"""Test log lines, for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from outrider.telemetry import logs

log = logging.getLogger("outrider.somewhere")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Collect what a process that logs JSON writes to standard error."""
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    monkeypatch.setenv(logs.FORMAT, "json")
    logs.configure("tester")
    yield said
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def read(said: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in said.getvalue().splitlines()]


def text_of(record_message: str, **known: str) -> str:
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, record_message, (), None)
    with logs.about(**known):
        return logs.TextFormatter("tester").format(record)


def test_a_line_has_time_level_logger_process_and_message(lines) -> None:
    log.warning("%d of %d", 1, 2)
    [line] = read(lines)
    assert datetime.fromisoformat(line.pop("time")).utcoffset().total_seconds() == 0  # type: ignore[union-attr]
    assert line == {
        "level": "WARNING",
        "logger": "outrider.somewhere",
        "process": "tester",
        "message": "1 of 2",
    }


def test_a_line_names_the_session_and_the_request_that_it_is_about(lines) -> None:
    with logs.about(session="s-1", request="r-1"):
        log.info("inside")
    log.info("outside")
    inside, outside = read(lines)
    assert (inside["session"], inside["request"]) == ("s-1", "r-1")
    assert "session" not in outside
    assert "request" not in outside


def test_no_line_holds_the_whole_id_of_a_session(lines) -> None:
    whole = "0123456789abcdef0123456789abcdef"
    with logs.about(session=whole):
        log.info("inside")
        logs.note(session=whole)
        log.info("noted")
    assert [line["session"] for line in read(lines)] == ["01234567", "01234567"]


@pytest.mark.parametrize("wrong", ["", "a b", "line\nbreak", "x" * 129, "ü", '{"a": 1}'])
def test_what_is_no_id_is_never_written_as_one(lines, wrong) -> None:
    with logs.about(session="s-1"), logs.about(session=wrong):
        log.info("inside")
    assert read(lines)[0]["session"] == "s-1"
    assert logs.request_id_from([(logs.REQUEST_HEADER, wrong)]) == ""


def test_what_was_sent_from_outside_makes_no_line_for_people() -> None:
    line = text_of("GET /x\n2026-01-01 00:00:00 edge ERROR forged\x1b[31m\x9b\u2028\r")
    assert line.endswith(r" tester INFO GET /x\n2026-01-01 00:00:00 edge ERROR forged\x1b[31m\x9b\u2028\r")
