"""Write to a peer that may not read, without waiting for it for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc


async def write_within(
    context: grpc.aio.ServicerContext[Any, Any], message: Any, limit_s: float
) -> asyncio.Future[None] | None:
    """Write a message; return None once it is written, or the write that is still under way after the limit.

    gRPC ends no call while a write is under way: the caller frees what the call holds, waits for the write, which takes
    no more than memory, and then ends the call. A write to a call that has ended raises CancelledError, as gRPC does in
    the call itself, which may come later than the write fails.
    """
    writing = asyncio.ensure_future(_write(context, message))
    try:
        await asyncio.wait({writing}, timeout=limit_s)
    except asyncio.CancelledError:
        writing.cancel()
        raise
    if not writing.done():
        return writing
    await writing
    return None


async def _write(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:  # "execute_batch" fails for a call that has ended, and for no other
        raise asyncio.CancelledError("the call has ended") from error
