"""Render a chat template in a child process, within limits of time and memory: it is a program of a stranger's.

Jinja2's sandbox keeps a template away from the system, and nothing in it bounds what a template takes: loops in loops,
or a text that is doubled thirty times. The child is started with the first message and kept. It answers one request
after the other; where one exceeds the limits the child ends, and the next request starts another.

On its standard streams a message is JSON behind its length, 8 bytes little-endian. The first one has the template.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from edge_agent.target.chat_template import LocalTemplate, Message
from outrider.core.errors import BadRequest, ModelRefused
from outrider.processes import bound_resources

RENDER_S = 5.0
"""Seconds in which a rendering must end; honest ones take milliseconds."""
START_S = 30.0
"""Seconds in which a child must have started."""
MEMORY_BYTES = 1 << 30
"""Address space of the child."""
MAX_ANSWER_BYTES = 128 << 20
"""Bytes of an answer, several times those of the longest prompt."""
_LENGTH = struct.Struct("<Q")
_ERRORS = {"BadRequest": BadRequest, "ModelRefused": ModelRefused, "ImportError": ImportError}


class TemplateProcess:
    """Renders one template. Any thread may call `render`; calls take turns."""

    def __init__(self, template: LocalTemplate) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ends: weakref.finalize[Any, Any] | None = None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Return what `LocalTemplate.render` returns. Raises what it raises, and ModelRefused beyond the limits."""
        try:
            request = json.dumps({"messages": messages, "variables": variables}, default=dict).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages must be JSON values: {error}", field="messages") from error
        with self._lock:
            try:
                answer = self._answer(request)
            except BaseException:
                self._end()
                raise
        if "text" in answer:
            return str(answer["text"])
        raise _error(answer)

    def _answer(self, request: bytes) -> dict[str, Any]:
        started = self._child is None or self._child.poll() is not None
        child = self._start() if started or self._child is None else self._child
        requests, answers = _streams(child)
        try:
            if started:
                _read_message(answers, START_S)
            requests.write(_LENGTH.pack(len(request)) + request)
            return _read_message(answers, RENDER_S)
        except TimeoutError:
            raise ModelRefused(f"the target's chat template takes longer than {RENDER_S:g} s") from None
        except (EOFError, OSError):
            code = child.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ModelRefused(f"the target's chat template ends the process that renders it ({how})") from None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a child, which answers when it has read the template. Raises ModelRefused for one that is no text."""
        from edge_agent.target import jinja  # noqa: F401  # raises ImportError that names the extra

        self._end()
        template = {"source": self._template.text, "special_tokens": self._template.special_tokens}
        command = [sys.executable, "-m", __name__]
        self._child = child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._ends = weakref.finalize(self, _end, child)
        first = json.dumps(template).encode()
        requests, _ = _streams(child)
        requests.write(_LENGTH.pack(len(first)) + first)
        return child

    def _end(self) -> None:
        if self._ends is not None:
            self._ends()
        self._child = self._ends = None


def _streams(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Return the streams on which a child reads requests and writes answers."""
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child was started without pipes")
    return child.stdin, child.stdout


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for stream in _streams(child):
        stream.close()
    child.wait()


def _read_message(stream: IO[bytes], limit_s: float) -> dict[str, Any]:
    """Return the child's next message. Raises TimeoutError, EOFError, or ModelRefused for one that is too long."""
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size, limit_s))
    if length > MAX_ANSWER_BYTES:
        raise ModelRefused(f"the target's chat template writes more than {MAX_ANSWER_BYTES} bytes")
    found: dict[str, Any] = json.loads(_read(stream, length, limit_s))
    return found


def _read(stream: IO[bytes], length: int, limit_s: float) -> bytes:
    """Return so many bytes. Raises TimeoutError, or EOFError if the child has ended."""
    end, found = time.monotonic() + limit_s, bytearray()
    while len(found) < length:
        ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(stream.fileno(), min(1 << 20, length - len(found)))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def _error(answer: Mapping[str, Any]) -> Exception:
    """Return the error that the child has raised."""
    cls, message = _ERRORS.get(str(answer.get("error")), ModelRefused), str(answer.get("message"))
    return cls(message, field=str(answer["field"])) if answer.get("field") and cls is BadRequest else cls(message)


# --- the child


def _serve() -> None:
    """Render what comes on standard input until it ends."""
    bound_resources({resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 32})
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    given = _next(requests)
    if given is None:
        return
    template = LocalTemplate(given["source"], variables=given["special_tokens"])
    _write(answers, {})
    while (request := _next(requests)) is not None:
        signal.alarm(math.ceil(2 * RENDER_S))  # if the parent has ended, nobody else ends what has no end
        answer: dict[str, Any]
        try:
            answer = {"text": template.render(request["messages"], request["variables"])}
        except (BadRequest, ModelRefused, ImportError) as error:
            answer = {"error": type(error).__name__, "message": str(error), "field": getattr(error, "field", "")}
        signal.alarm(0)
        _write(answers, answer)


def _write(stream: IO[bytes], answer: Mapping[str, Any]) -> None:
    encoded = json.dumps(answer).encode()
    stream.write(_LENGTH.pack(len(encoded)) + encoded)
    stream.flush()


def _next(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    found: dict[str, Any] = json.loads(stream.read(*_LENGTH.unpack(head)))
    return found


if __name__ == "__main__":
    _serve()
