"""Admit a call by its metadata before its request is read, and read the request within a bounded time.

An interceptor of grpc.aio runs before the request of a unary call is read, so it can refuse a caller without a
credential. But once it lets a call pass, gRPC waits without limit for a request of up to MAX_MESSAGE_BYTES, and a
tenant with a credential may begin thousands. So admitted unary calls are served as streams of one message, which looks
the same to the client: they are read a few at a time, and an unfinished request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.wire.status import aborting

Metadata = Iterable[tuple[str, str | bytes]]
Admit = Callable[[str, Metadata], Awaitable[str | None]]
"""Full name of the method and metadata of a call -> the tenant whose calls it counts among, None if among nobody's.
Raises OutriderError if the call must not be read."""

REQUEST_S = 10.0
"""Seconds in which the request of a call must have come."""
READS = 16
"""Requests of one tenant that are read at once, of up to MAX_MESSAGE_BYTES each; its others stay unread."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Shares:
    """Counts what each tenant holds at once of something. A tenant may hold as many as are free: one has half of them,
    two have a third each, so that however many are hostile, some stay free for others."""

    def __init__(self, most: int, what: str) -> None:
        """most: of all tenants together. what: they are, for messages."""
        self._most = most
        self._what = what
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Return how many all tenants hold."""
        return self._held.total()

    @contextlib.contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Hold one more for a tenant until the body ends. Raises Overloaded if there are too many."""
        if (held := self._held[tenant]) and held >= self._most - self._held.total():
            raise Overloaded(f"tenant {tenant} has {held} {self._what}, as many as are free for all; try again")
        self._held[tenant] += 1
        try:
            yield
        finally:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]


class AdmitBeforeReading(grpc.aio.ServerInterceptor):
    """Admits calls with one request. Calls that stream their requests admit by themselves before they read."""

    def __init__(self, admit: Admit, most: int) -> None:
        """most: calls of all tenants at once."""
        self._admit = admit
        self._calls = Shares(most, "calls at once")
        self._reads = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(READS))

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of the method, with our reading before its own."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or handler.request_streaming:
            return handler
        respond = handler.unary_stream if handler.response_streaming else handler.unary_unary
        build = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )

        async def read_and_respond(requests: AsyncIterator[bytes], context: _Context) -> Any:
            with contextlib.ExitStack() as held:
                async with aborting(context):
                    tenant = await self._admit(method, context.invocation_metadata() or ())
                    if tenant is not None:
                        held.enter_context(self._calls.one(tenant))
                    async with self._reads[tenant] if tenant is not None else contextlib.nullcontext():
                        request = await _read(requests, handler.request_deserializer)
                return await respond(request, context)

        return build(read_and_respond, None, handler.response_serializer)


async def _read(requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
    """Return the request of a call. Raises Unavailable if it does not come in time, and BadRequest if there is none."""
    try:
        async with asyncio.timeout(REQUEST_S):  # without a task, unlike wait_for
            return parse(await anext(requests))
    except TimeoutError:
        raise Unavailable(f"no whole request came within {REQUEST_S} s of the call's begin") from None
    except StopAsyncIteration:
        raise BadRequest("the call ended before its request") from None
    except DecodeError:
        raise BadRequest("the request cannot be parsed; is the caller of another version?") from None
