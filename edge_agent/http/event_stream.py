"""Server-sent events that end with their reader: a client that goes away, or reads no more, closes what makes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_A = TypeVar("_A")

DONE = b"data: [DONE]\n\n"

_HEADERS = {
    b"content-type": b"text/event-stream; charset=utf-8",
    b"cache-control": b"no-cache",
    b"x-accel-buffering": b"no",  # nginx would gather events
}

Events = AsyncGenerator[bytes, None]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, _A]) -> _A:
    """What `work` returns. A client that goes away cancels it; then ClientGone is raised."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})


class EventStream(Response):
    """An answer whose first event is there already, so that what fails before it has a status of its own.

    stall_s: seconds in which a client has to take something of it; one that does not would hold its sessions for good.
    """

    def __init__(self, first: bytes, rest: Events, stall_s: float) -> None:
        super().__init__()
        self._first = first
        self._rest = rest
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, gone = asyncio.create_task(self._send(send)), asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except ClientGone:
            log.warning("a client took nothing of its stream for %g s: its request ends", self._stall_s)
        finally:
            for one in (sending, gone):
                one.cancel()
            await asyncio.wait({sending, gone})
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        headers = list(_HEADERS.items())
        await self._take(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await self._take(send, {"type": "http.response.body", "body": self._first, "more_body": True})
        async with contextlib.aclosing(self._rest):
            async for data in self._rest:
                await self._take(send, {"type": "http.response.body", "body": data, "more_body": True})
        await self._take(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _take(self, send: Send, message: Message) -> None:
        """Raises ClientGone."""
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            raise ClientGone from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
