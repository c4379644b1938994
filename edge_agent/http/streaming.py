"""Run the choices of one request, and send them as server-sent events that end with their reader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Chunk, Completion
from outrider.core.errors import Unavailable

log = logging.getLogger(__name__)

_A = TypeVar("_A")

STALL_S = 60.0
"""Seconds after which a client that takes nothing of its stream counts as gone."""
HEADERS_S = 5.0
"""Seconds for which the headers of a stream wait for a verifier at most."""
LOOK_S = 0.05
"""Seconds between two looks for one."""
QUIET_S = 10.0
"""Seconds without an event after which a comment goes to the client: proxies and clients end connections that idle."""
COMMENT = b": the answer is being made\n\n"
DONE = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""nginx would gather events."""

Events = AsyncGenerator[bytes, None]


class ClientGone(Exception):
    """Raised when the client no longer waits for the answer."""


STOPPING = Unavailable("this server is stopping; send the request again")
"""What ends a request that still ran when the server's time to stop was over: uvicorn cancels its task."""


# --- choices


async def drained(streams: Sequence[CompletionStream]) -> list[Completion]:
    """Run all streams to their ends. The first error, and a cancellation, ends all."""

    def unwritten(choice: int, chunk: Chunk | None) -> Sequence[None]:
        return ()

    async with contextlib.aclosing(merged(streams, unwritten)) as running:
        async for _ in running:
            pass
    return [stream.completion for stream in streams]


async def merged(
    streams: Sequence[CompletionStream], write: Callable[[int, Chunk | None], Sequence[_A]]
) -> AsyncGenerator[_A, None]:
    """Yield what is written of the chunks of all streams, as they come. The first error ends all; so does closing this.

    write: gets the index of a stream, and its next chunk, or None at its end.
    """
    if len(streams) == 1:  # without a task and a queue on the way
        async with streams[0] as stream:
            while (chunk := await stream.next()) is not None:
                for item in write(0, chunk):
                    yield item
            for item in write(0, None):
                yield item
        return
    queue: asyncio.Queue[Sequence[_A] | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def forward(choice: int, stream: CompletionStream) -> None:
        try:
            async with stream:
                while (chunk := await stream.next()) is not None:
                    await queue.put(write(choice, chunk))
            await queue.put(write(choice, None))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(choice, stream)) for choice, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            written = await queue.get()
            if isinstance(written, Exception):
                raise written
            left -= written is None
            for item in written or ():
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


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


async def streamed(
    events: Events, streams: Sequence[CompletionStream], failed: Callable[[Exception], bytes]
) -> Response:
    """Return the response with these events once a verifier has one of their streams: what fails before, as for lack of
    room, has a status of its own.

    failed: returns the events that end the response because of a later error.
    """
    first = asyncio.ensure_future(anext(events))
    response = _EventStream(first, events, failed)
    try:
        latest = time.monotonic() + HEADERS_S
        while not first.done() and time.monotonic() < latest and not any(one.statistics.bytes_down for one in streams):
            await asyncio.wait({first}, timeout=LOOK_S)
        if first.done():
            first.result()
    except BaseException:
        await response.end()
        raise
    return response


class _EventStream(StreamingResponse):
    """A response with a first event and those that follow, and comments while there are none for QUIET_S seconds.

    A client that takes nothing for STALL_S seconds ends it: otherwise it would hold its sessions for good.
    """

    def __init__(self, first: asyncio.Future[bytes], rest: Events, failed: Callable[[Exception], bytes]) -> None:
        super().__init__(self._all(), headers=_HEADERS, media_type="text/event-stream")
        self._next = first
        self._rest = rest
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self.end)
                sent = await stack.enter_async_context(first_done(self.stream_response(send), _disconnected(receive)))
                if sent.done():
                    sent.result()
        except asyncio.CancelledError:
            await send({"type": "http.response.body", "body": self._failed(STOPPING)})

    async def end(self) -> None:
        """End the work behind the events."""
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        await self._rest.aclose()

    async def _all(self) -> Events:
        try:
            while True:
                while not self._next.done() and not (await asyncio.wait({self._next}, timeout=QUIET_S))[0]:
                    yield COMMENT
                yield self._next.result()
                self._next = asyncio.ensure_future(anext(self._rest))
        except StopAsyncIteration:
            return
        except Exception as error:
            yield self._failed(error)

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
