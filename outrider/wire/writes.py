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
    no more than memory, and then ends the call.
    """
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.wait({writing}, timeout=limit_s)
    except asyncio.CancelledError:
        writing.cancel()
        raise
    if not writing.done():
        return writing
    await writing
    return None
