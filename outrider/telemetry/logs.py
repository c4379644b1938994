"""Logs of a process, as lines for people or as JSON for machines, each with the session and the request it is about.

A line never holds a prompt or generated text: messages name sessions, epochs, counts and errors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from typing import Any, Literal, get_args

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
REQUEST_HEADER = "x-request-id"
"""In a call's metadata, and in HTTP."""
MAX_ID = 128
"""Characters of an id that came from outside: more, or others than these, are no id."""
_ID = re.compile(rf"[\w.:-]{{1,{MAX_ID}}}", re.ASCII)

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS}

session_id: ContextVar[str] = ContextVar("session_id", default="")
"""Of the session that the current task works for, as is the next."""
request_id: ContextVar[str] = ContextVar("request_id", default="")


@contextlib.contextmanager
def about(*, session: str = "", request: str = "") -> Iterator[None]:
    """What is logged in the body, and by tasks begun there, is about these; "", or what is no id, leaves one as it
    is."""
    tokens: list[Token[str]] = []
    for variable, value in ((session_id, session), (request_id, request)):
        if _ID.fullmatch(value):
            tokens.append(variable.set(value))
    try:
        yield
    finally:
        for token in tokens:
            token.var.reset(token)


def note(*, session: str = "", request: str = "") -> None:
    """As `about`, for the rest of the current task, which is the session's own."""
    if _ID.fullmatch(session):
        session_id.set(session)
    if _ID.fullmatch(request):
        request_id.set(request)


def given_request(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The request's id by a call's metadata; "" where none came, or what is none."""
    for name, value in metadata or ():
        if name == REQUEST_HEADER and isinstance(value, str) and _ID.fullmatch(value):
            return value
    return ""


def request_metadata() -> tuple[tuple[str, str], ...]:
    """For a call that is made for the current request, so that its server's logs name it, too."""
    request = request_id.get()
    return ((REQUEST_HEADER, request),) if request else ()


def configure(form: LogFormat, process: str, level: int | str = logging.INFO) -> None:
    """Log to standard error from here on, the whole process. process: its name in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if form == "json" else Lines(process))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


class Lines(logging.Formatter):
    """For people: time, process, level, message; then what it is about, where that is known.

    Control characters come escaped: what a peer sent makes no line of its own, and does nothing to a terminal.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        known = "".join(f" {name}={value}" for name, value in _about() if value not in record.message)
        return f"{super().formatMessage(record)}{f' [{known[1:]}]' if known else ''}".translate(_ESCAPES)

    def formatException(self, ei: Any) -> str:
        return "\n".join(line.translate(_ESCAPES) for line in super().formatException(ei).split("\n"))


class JsonLines(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, process, message; session and request where known, and
    error with a traceback where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **dict(_about()),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _about() -> list[tuple[str, str]]:
    known = (("session", session_id.get()), ("request", request_id.get()))
    return [(name, value) for name, value in known if value]
