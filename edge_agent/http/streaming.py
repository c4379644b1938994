"""Run the choices of one request, and send them as server-sent events that end with their reader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Chunk, Completion

log = logging.getLogger(__name__)

_A = TypeVar("_A")

AppStatus.enable_automatic_graceful_drain = False  # uvicorn gives streams `stop_s` seconds to finish

DONE = b"data: [DONE]\n\n"

ChoiceChunks = AsyncGenerator[tuple[int, Chunk | None], None]
"""(index of the choice, its next chunk, or None at its end)"""
Events = AsyncGenerator[bytes, None]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


# --- choices


async def drained(streams: Sequence[CompletionStream]) -> list[Completion]:
    """Run all streams to their ends. The first error, and a cancellation, ends all."""
    tasks = [asyncio.create_task(stream.drain()) for stream in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def merged(streams: Sequence[CompletionStream]) -> ChoiceChunks:
    """Yield the chunks of all streams as they come. The first error ends all; so does closing this."""
    if len(streams) == 1:  # without a task and a queue on the way
        async with streams[0] as stream:
            while (chunk := await stream.next()) is not None:
                yield 0, chunk
            yield 0, None
        return
    queue: asyncio.Queue[tuple[int, Chunk | None] | Exception] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.create_task(_forward(choice, stream, queue)) for choice, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1] is None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _forward(
    choice: int, stream: CompletionStream, queue: asyncio.Queue[tuple[int, Chunk | None] | Exception]
) -> None:
    try:
        async with stream:
            while (chunk := await stream.next()) is not None:
                await queue.put((choice, chunk))
        await queue.put((choice, None))
    except Exception as error:
        await queue.put(error)


# --- events


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def first_done(
    work: Coroutine[Any, Any, _A], end: Coroutine[Any, Any, object]
) -> AsyncIterator[asyncio.Task[_A]]:
    """Run both until one of them ends; yields the task of `work`, and cancels what still runs after the body."""
    tasks = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _A]) -> _A:
    """Return the result of `work`; a client that goes away cancels it, and ClientGone is raised."""
    async with first_done(work, _disconnected(request.receive)) as task:
        if not task.done():
            raise ClientGone
        return task.result()


class EventStream(EventSourceResponse):
    """A response whose first event is known already, so that what fails before it has a status of its own.

    A client that takes nothing for `stall_s` seconds ends it: otherwise it would hold its sessions for good.
    """

    def __init__(self, first: bytes, rest: Events, stall_s: float) -> None:
        super().__init__(_from(first, rest), headers={"cache-control": "no-cache"}, ping=0, send_timeout=stall_s)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._rest):
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.warning("a client took nothing of its stream for %g s: its request ends", self.send_timeout)


async def _from(first: bytes, rest: Events) -> Events:
    yield first
    async for data in rest:
        yield data


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
