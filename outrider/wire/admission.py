"""Admit a call by its metadata before its request is read, and read the request within a bounded time.

A server of grpc.aio reads the one request of a unary call before it calls any code of ours, whoever sends it, and waits
for it without limit. Here such calls are served as streams with one message, which looks the same to the client: what
strangers send fills no more than a stream's look-ahead (wire.channels), and an unfinished request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc

from outrider.core.errors import BadRequest, Overloaded
from outrider.wire.status import aborting

Metadata = Iterable[tuple[str, str | bytes]]
Admit = Callable[[str, Metadata], Awaitable[str | None]]
"""Full name of the method and metadata of a call -> the tenant whose calls it counts among, None if among nobody's.
Raises OutriderError if the call must not be read."""

REQUEST_S = 10.0
"""Seconds in which the request of a call must have come."""

_Context = grpc.aio.ServicerContext[Any, Any]


class AdmitBeforeReading(grpc.aio.ServerInterceptor):
    """Serves calls with one request so. Calls that stream their requests admit and read by themselves."""

    def __init__(self, admit: Admit, most: int) -> None:
        """most: calls of one tenant at once."""
        self._admit = admit
        self._most = most
        self._calls: Counter[str] = Counter()

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

        async def read_and_respond(requests: AsyncIterator[Any], context: _Context) -> Any:
            with contextlib.ExitStack() as held:
                async with aborting(context):
                    tenant = await self._admit(method, context.invocation_metadata() or ())
                    if tenant is not None:
                        held.enter_context(self._counted(tenant))
                    request = await _first(requests)
                return await respond(request, context)

        return build(read_and_respond, handler.request_deserializer, handler.response_serializer)

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Count a call while it lasts. Raises Overloaded if it is one too many."""
        if self._calls[tenant] >= self._most:
            raise Overloaded(f"tenant {tenant} has {self._most} calls at once, the most that one may have; try again")
        self._calls[tenant] += 1
        try:
            yield
        finally:
            self._calls[tenant] -= 1
            if not self._calls[tenant]:
                del self._calls[tenant]


async def _first(requests: AsyncIterator[Any]) -> Any:
    """Return the request of a call. Raises BadRequest if none comes in time."""
    try:
        return await asyncio.wait_for(anext(requests), REQUEST_S)
    except TimeoutError:
        raise BadRequest(f"no whole request came within {REQUEST_S} s of the call's begin") from None
    except StopAsyncIteration:
        raise BadRequest("the call ended before its request") from None
