"""Run the choices of one request, and send them as server-sent events that end with their reader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Chunk, Completion

log = logging.getLogger(__name__)

_A = TypeVar("_A")

STALL_S = 60.0
"""Seconds after which a client that takes nothing of its stream counts as gone."""
DONE = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""nginx would gather events."""

ChoiceChunks = AsyncGenerator[tuple[int, Chunk | None], None]
"""(index of the choice, its next chunk, or None at its end)"""
Events = AsyncGenerator[bytes, None]


class ClientGone(Exception):
    """Raised when the client no longer waits for the answer."""


# --- choices


async def drained(streams: Sequence[CompletionStream]) -> list[Completion]:
    """Run all streams to their ends. The first error, and a cancellation, ends all."""
    async with contextlib.aclosing(merged(streams)) as choices:
        async for _ in choices:
            pass
    return [stream.completion for stream in streams]


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


def event(content: object, name: str = "") -> bytes:
    """Return a server-sent event. name: its type; without one it has no `event` field."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return f"{f'event: {name}{chr(10)}' if name else ''}data: {data}\n\n".encode()


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


async def streamed(events: Events) -> Response:
    """Return the response with these events once the first is known: what fails before it has a status of its own."""
    try:
        return _EventStream(await anext(events), events)
    except BaseException:
        await events.aclose()
        raise


class _EventStream(StreamingResponse):
    """A response with a first event and those that follow.

    A client that takes nothing for STALL_S seconds ends it: otherwise it would hold its sessions for good.
    """

    def __init__(self, first: bytes, rest: Events) -> None:
        super().__init__(self._all(), headers=_HEADERS, media_type="text/event-stream")
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = self.stream_response(send)
        async with contextlib.aclosing(self._rest), first_done(sending, _disconnected(receive)) as sent:
            if sent.done():
                sent.result()

    async def _all(self) -> Events:
        yield self._first
        async for data in self._rest:
            yield data

    async def stream_response(self, send: Send) -> None:
        """Send all events, unless the client does not take a message in time."""

        async def within_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().stream_response(within_time)
        except TimeoutError:
            log.warning("a client took nothing of its stream for %g s: its request ends", STALL_S)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
