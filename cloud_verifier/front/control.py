"""Exchange calls and notices, as JSON, between the verifier's process and one of its further front processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloud_verifier.engine_process import ipc
from outrider.core.errors import InternalError, OutriderError, Unavailable
from outrider.wire.v1 import engine_pb2

log = logging.getLogger(__name__)

Handler = Callable[..., Any]
"""Called with the arguments of a message. What it returns, or what that becomes when it is awaited, is the answer; an
OutriderError that it raises is raised at the other end."""
_HEADER_BYTES = 4
_FAILURE = ("kind", "message", "field", "retry_after_s")
GONE = "a process of this verifier has ended; try again, or resume on another verifier"


class ControlLink:
    """Passes messages over a socket whose other end is another process of the same verifier."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        """handlers: by the names of messages that the other end sends."""
        self._handlers = handlers
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        """Calls without an answer yet, by number."""
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket) -> None:
        """Serve the other end of a socket until that ends."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    size = int.from_bytes(await reader.readexactly(_HEADER_BYTES), "little")
                    self._take(json.loads(await reader.readexactly(size)))
        finally:
            self._writer.close()
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(Unavailable(GONE))
            for task in self._answering:
                task.cancel()

    async def close(self) -> None:
        """Send what was told, and end."""
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    async def ask(self, name: str, **arguments: Any) -> Any:
        """Return the answer to a call. Raises what the other end's handler raised, and Unavailable if it has gone."""
        if self._writer is None or self._writer.is_closing():
            raise Unavailable(GONE)
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send({"name": name, "arguments": arguments, "number": number})
            return await answer
        finally:
            del self._asked[number]

    def tell(self, name: str, **arguments: Any) -> None:
        """Send a notice, unless the other end has gone."""
        self._send({"name": name, "arguments": arguments})

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(ipc.frame(json.dumps(message).encode()))

    def _take(self, message: dict[str, Any]) -> None:
        """Handle a message: what needs no waiting at once, so that it is done before later ones."""
        number = message.get("number")
        if "name" not in message:
            asked = self._asked.get(number or 0)
            if asked is not None and not asked.done():
                if "failure" in message:
                    asked.set_exception(error_of(message["failure"]))
                else:
                    asked.set_result(message["answer"])
            return
        try:
            answer = self._handlers[message["name"]](**message["arguments"])
        except Exception as error:
            self._answer(number, error=error)
            return
        if inspect.isawaitable(answer):
            task = asyncio.ensure_future(self._answer_later(number, answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._answer(number, answer)

    async def _answer_later(self, number: int | None, answer: Awaitable[Any]) -> None:
        try:
            found = await answer
        except Exception as error:
            self._answer(number, error=error)
        else:
            self._answer(number, found)

    def _answer(self, number: int | None, answer: Any = None, error: Exception | None = None) -> None:
        if error is not None and not isinstance(error, OutriderError):
            log.error("a message between processes of this verifier failed", exc_info=error)
            error = InternalError(f"the verifier failed: {type(error).__name__}")
        if number is not None:
            self._send({"number": number, **({"answer": answer} if error is None else {"failure": failure_of(error)})})


def failure_of(error: OutriderError) -> dict[str, Any]:
    """Return an error as JSON, which `error_of` reads."""
    failure = ipc.failure_event(error).failure
    return {name: getattr(failure, name) for name in _FAILURE}


def error_of(failure: dict[str, Any]) -> OutriderError:
    """Return the error that `failure_of` was given."""
    return ipc.error_from_failure(engine_pb2.EngineFailure(**failure))
