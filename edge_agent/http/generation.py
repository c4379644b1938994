"""The choices of one request while they are made: some completions at once, told of as they grow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from edge_agent.sdk.completion_stream import CompletionStream
from edge_agent.sdk.types import Chunk, Completion


@dataclass(frozen=True)
class Growth:
    """Of one choice. chunk: None at its end."""

    choice: int
    chunk: Chunk | None


async def whole(streams: Sequence[CompletionStream]) -> list[Completion]:
    """All of them to their ends. The first error, and a cancellation, ends all."""
    tasks = [asyncio.create_task(stream.drain()) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def growing(streams: Sequence[CompletionStream]) -> AsyncGenerator[Growth, None]:
    """Chunks as they come. The first error ends all; so does closing this."""
    if len(streams) == 1:
        async with contextlib.aclosing(_alone(streams[0])) as growths:
            async for growth in growths:
                yield growth
        return
    news: asyncio.Queue[Growth | Exception] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.create_task(_tell(choice, stream, news)) for choice, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            left -= item.chunk is None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _alone(stream: CompletionStream) -> AsyncGenerator[Growth, None]:
    """Without a task and a queue between the stream and whoever reads."""
    try:
        while (chunk := await stream.next()) is not None:
            yield Growth(0, chunk)
        yield Growth(0, None)
    finally:
        await stream.aclose()


async def _tell(choice: int, stream: CompletionStream, news: asyncio.Queue[Growth | Exception]) -> None:
    try:
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                await news.put(Growth(choice, chunk))
        await news.put(Growth(choice, None))
    except Exception as error:
        await news.put(error)
