"""Admit a call by its metadata before its request is read, and read the request within a bounded time.

A server of grpc.aio reads the one request of a unary call before it calls any code of ours, whoever sends it, and waits
for it without limit. Here such calls are served as streams with one message, which looks the same to the client: what
strangers send fills no more than a stream's look-ahead (wire.channels), and an unfinished request ends.

Health checks are for everybody. Only a few of their requests are waited for at a time, since each may be as long as any
message; a check beyond these is answered without its request, as one for the whole server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.core.errors import BadRequest, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from outrider.wire.channels import PUBLIC_REQUESTS
from outrider.wire.status import aborting
from outrider.wire.strangers import CHECKS_S, Strangers

Metadata = Iterable[tuple[str, str | bytes]]
Admit = Callable[[str, Metadata], Awaitable[str | None]]
"""Full name of the method and metadata of a call -> the tenant whose calls it counts among, None if among nobody's.
Raises OutriderError if the call must not be read."""

REQUEST_S = 10.0
"""Seconds in which the request of a call must have come."""
READS = 16
"""Requests of one tenant that are waited for at once, of up to MAX_MESSAGE_BYTES each; its others stay unread."""
REFLECTION_S = 60.0
"""Seconds that a call of reflection may take."""
_CHECK = "/grpc.health.v1.Health/Check"
_HEALTH, _REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/"

_Context = grpc.aio.ServicerContext[Any, Any]


class AdmitBeforeReading(grpc.aio.ServerInterceptor):
    """Serves calls with one request so. Calls that stream their requests admit and read by themselves."""

    def __init__(self, admit: Admit, most: int, strangers: Strangers) -> None:
        """most: calls of all tenants at once. A tenant may have as many as are free: one has half of them, two have a
        third each, so that however many are hostile, some stay free for others."""
        self._admit = admit
        self._most = most
        self._strangers = strangers
        self._calls: Counter[str] = Counter()
        self._reads: dict[str, asyncio.Semaphore] = {}
        self._public = self._reflected = 0
        """Requests of health checks that are waited for, and calls of reflection."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of the method, with our reading before its own."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._unknown)
        if handler.request_streaming:
            return self._bounded(handler) if method.startswith(_REFLECTION) else handler
        respond = handler.unary_stream if handler.response_streaming else handler.unary_unary
        build = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )

        async def read_and_respond(requests: AsyncIterator[bytes], context: _Context) -> Any:
            with contextlib.ExitStack() as held:
                async with aborting(context):
                    tenant = await self._admitted(method, context)
                    reading: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
                    if tenant is not None:
                        reading = held.enter_context(self._counted(tenant))
                    read = self._read_public if method.startswith(_HEALTH) else _read
                    async with reading:
                        request = _parsed(await read(requests), handler.request_deserializer)
                try:
                    return await respond(request, context)
                except grpc.aio.AbortError:
                    if method.startswith(_HEALTH) and context.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                        self._strangers.refused(context.peer())
                    raise

        return build(read_and_respond, None, handler.response_serializer)

    async def _unknown(self, _: AsyncIterator[bytes], context: _Context) -> None:
        """Refuse a call of a method that the server does not have, which needs no credential, either."""
        self._strangers.refused(context.peer())
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def _admitted(self, method: str, context: _Context) -> str | None:
        """Return the tenant of a call as `admit` does, and note whether its peer has a credential."""
        if method == _CHECK and self._strangers.check_refused(context.peer()):
            self._strangers.refused(context.peer())
            raise Overloaded("too many health checks come from your address; try again", retry_after_s=CHECKS_S)
        try:
            tenant = await self._admit(method, context.invocation_metadata() or ())
        except (Unauthenticated, PermissionDenied):
            self._strangers.refused(context.peer())
            raise
        if not method.startswith(_HEALTH):
            self._strangers.admitted(context.peer(), tenant or "")
        return tenant

    async def _read_public(self, requests: AsyncIterator[bytes]) -> bytes:
        """Return the request of a call that anybody may make: an empty one if too many are waited for already."""
        if self._public >= PUBLIC_REQUESTS:
            return b""
        self._public += 1
        try:
            return await _read(requests)
        finally:
            self._public -= 1

    def _bounded(self, handler: Any) -> Any:
        """Return the handler of reflection for few callers at once, each for a bounded time."""

        async def serve(requests: Any, context: _Context) -> AsyncIterator[Any]:
            async with aborting(context):
                if self._reflected >= PUBLIC_REQUESTS:
                    self._strangers.refused(context.peer())
                    raise Overloaded(f"{PUBLIC_REQUESTS} callers use reflection already; try again")
                self._reflected += 1
                try:
                    async with asyncio.timeout(REFLECTION_S):
                        async for answer in handler.stream_stream(requests, context):
                            yield answer
                except TimeoutError:
                    raise BadRequest(f"a call of reflection ends after {REFLECTION_S} s; begin another one") from None
                finally:
                    self._reflected -= 1

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[asyncio.Semaphore]:
        """Count a call while it lasts; yield what to hold while its request is read. Raises Overloaded if it is one too
        many."""
        if (calls := self._calls[tenant]) and calls >= self._most - self._calls.total():
            raise Overloaded(f"tenant {tenant} has {calls} calls at once, as many as are free for all; try again")
        self._calls[tenant] += 1
        try:
            yield self._reads.setdefault(tenant, asyncio.Semaphore(READS))
        finally:
            self._calls[tenant] -= 1
            if not self._calls[tenant]:
                del self._calls[tenant], self._reads[tenant]


async def _read(requests: AsyncIterator[bytes]) -> bytes:
    """Return the request of a call. Raises Unavailable if it does not come in time, and BadRequest if there is none."""
    try:
        async with asyncio.timeout(REQUEST_S):  # without a task, unlike wait_for
            return await anext(requests)
    except TimeoutError:
        raise Unavailable(f"no whole request came within {REQUEST_S} s of the call's begin") from None
    except StopAsyncIteration:
        raise BadRequest("the call ended before its request") from None


def _parsed(request: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Return a request as a message. Raises BadRequest if it is none: it comes from outside, and is no defect."""
    try:
        return parse(request)
    except DecodeError:
        raise BadRequest("the request cannot be parsed; is the caller of another version?") from None
