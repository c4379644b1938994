"""Serve TCP in a test, and close every connection at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable


@contextlib.asynccontextmanager
async def serving(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]],
) -> AsyncIterator[str]:
    """Have `handle` serve each connection to a loopback port; yield the address.

    asyncio leaves a connection open when its handler returns. Once the loop is closed nothing closes it, and the
    ResourceWarning may fail whichever later test collects it.
    """
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await handle(reader, writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await asyncio.sleep(0)  # for a connection that has just been accepted
            while writers:
                writer = writers.pop()
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
