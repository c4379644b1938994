"""Write the logs of a process, as text or as JSON, each line with the session and the request that it is about.

A line never holds a prompt, generated text or the credentials of a URL: messages name sessions, epochs, counts and
errors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from outrider.core.text import counted, masked, short_id

FORMAT = "OUTRIDER_LOG_FORMAT"
"""The variable of all processes that says how they log: text, lines for people, or json, one object per line."""
REQUEST_HEADER = "x-request-id"
"""The name of the request's id in the metadata of calls and in HTTP headers."""
MAX_ID = 128
"""Characters of an id from outside; a longer one, or one with other characters than `_ID`, is ignored."""
REMIND_S = 60.0
"""Seconds between two lines about the same failure, as long as it lasts."""
_ID = re.compile(rf"[\w.:-]{{1,{MAX_ID}}}", re.ASCII)

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS}

session_id: ContextVar[str] = ContextVar("session_id", default="")
"""The session that the current task works for, by the beginning of its id (`core.text.short_id`)."""
request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that the current task works for."""


@contextlib.contextmanager
def about(*, session: str = "", request: str = "") -> Iterator[None]:
    """Name a session and a request in every line that the body, and tasks begun there, write.

    An empty or invalid id leaves the current one.
    """
    before = session_id.get(), request_id.get()
    note(session=session, request=request)
    try:
        yield
    finally:
        session_id.set(before[0])
        request_id.set(before[1])


def note(*, session: str = "", request: str = "") -> None:
    """Name session and request in what the rest of the task writes. An empty or invalid id leaves the current one."""
    if _ID.fullmatch(session):
        session_id.set(short_id(session))
    if _ID.fullmatch(request):
        request_id.set(request)


def request_id_from(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the request's id in a call's metadata; "" if it has no valid one."""
    for name, value in metadata or ():
        if name == REQUEST_HEADER and isinstance(value, str) and _ID.fullmatch(value):
            return value
    return ""


def request_metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata for calls that serve the current request, so that the server's logs name it, too."""
    request = request_id.get()
    return ((REQUEST_HEADER, request),) if request else ()


class RepeatedFailure:
    """Logs the first failure of each kind, then a count a minute while there are more, and that it works again.

    A failure's kind is its message without arguments, and the class of the error among them. What fails and works by
    turns is told once a minute, too.
    """

    def __init__(self, log: logging.Logger, again: str) -> None:
        """again: what is logged when it works again, such as "reports are taken again"."""
        self._log, self._again = log, again
        self._count = 0
        """Failures since it last worked, or since that was logged last."""
        self._logged = False
        """Whether one of them was logged."""
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}
        """kind -> when it was logged last, and how often it has failed since"""

    def failed(self, message: str, *arguments: object) -> None:
        """Note a failure. message, arguments: as those of a logger."""
        kind = message, *(type(one) for one in arguments if isinstance(one, Exception))
        now, (logged_at, more) = time.monotonic(), self._kinds.get(kind, (-math.inf, 0))
        self._count += 1
        if now - logged_at < REMIND_S:
            self._kinds[kind] = logged_at, more + 1
            return
        times = f" ({more + 1} times in {now - logged_at:.0f} s)" if more else ""
        self._log.warning(message + times, *arguments)
        self._kinds[kind], self._logged = (now, 0), True

    def worked(self) -> None:
        """Note a success."""
        if self._logged:
            self._log.info("%s, after %s", self._again, counted(self._count, "failure"))
            self._count, self._logged = 0, False


def is_json() -> bool:
    """Return whether the environment asks for JSON."""
    return os.environ.get(FORMAT) == "json"


def configure(process: str, level: int | str = logging.INFO) -> None:
    """Make the whole process log to standard error, as the environment says. process: its name in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if is_json() else TextFormatter(process))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    if (given := os.environ.get(FORMAT, "")) not in ("", "text", "json"):
        logging.getLogger(__name__).warning("%s is %r, must be text or json; this is text", FORMAT, given[:20])


class TextFormatter(logging.Formatter):
    """Writes text: time, process, level, message, and the session and request if they are known.

    Control characters are escaped, so that what a peer sent can neither begin a line nor steer a terminal.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        known = "".join(f" {name}={value}" for name, value in _about() if value not in record.message)
        line = f"{super().formatMessage(record)}{f' [{known[1:]}]' if known else ''}"
        return masked(line).translate(_ESCAPES)

    def formatException(self, ei: Any) -> str:
        return "\n".join(masked(line).translate(_ESCAPES) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line: time (RFC 3339, UTC), level, logger, process and message.

    It also has session and request if they are known, and error, with a traceback, if there is one.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": masked(record.getMessage()),
            **dict(_about()),
        }
        if record.exc_info:
            line["error"] = masked(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def _about() -> list[tuple[str, str]]:
    known = (("session", session_id.get()), ("request", request_id.get()))
    return [(name, value) for name, value in known if value]
