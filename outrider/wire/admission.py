"""Admit a call by its metadata before its request is read, and read the request within a bounded time.

A server of grpc.aio reads the one request of a unary call before it calls any code of ours, whoever sends it, and waits
for it without limit. Here such calls are served as streams with one message, which looks the same to the client: what
strangers send fills no more than a stream's look-ahead (wire.channels), and an unfinished request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from outrider.core.errors import BadRequest
from outrider.wire.status import aborting

Metadata = Iterable[tuple[str, str | bytes]]
Admit = Callable[[str, Metadata], Awaitable[None]]
"""Full name of the method and metadata of a call -> returns if it may be read. Raises OutriderError."""

REQUEST_S = 10.0
"""Seconds in which the request of a call must have come."""

_Context = grpc.aio.ServicerContext[Any, Any]


class AdmitBeforeReading(grpc.aio.ServerInterceptor):
    """Serves calls with one request so. Calls that stream their requests admit and read by themselves."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

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
            async with aborting(context):
                await self._admit(method, context.invocation_metadata() or ())
                request = await _first(requests)
            return await respond(request, context)

        return build(read_and_respond, handler.request_deserializer, handler.response_serializer)


async def _first(requests: AsyncIterator[Any]) -> Any:
    """Return the request of a call. Raises BadRequest if none comes in time."""
    try:
        return await asyncio.wait_for(anext(requests), REQUEST_S)
    except TimeoutError:
        raise BadRequest(f"no whole request came within {REQUEST_S} s of the call's begin") from None
    except StopAsyncIteration:
        raise BadRequest("the call ended before its request") from None
