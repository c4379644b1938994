"""One request while it runs: chunks as they come, the whole when they have come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Self

from edge_agent.completion import Chunk, Completion, FinishReason
from edge_agent.statistics import Statistics, Usage
from outrider.core.errors import OutriderError

Chunks = AsyncGenerator[tuple[Chunk, FinishReason | None], None]


class CompletionStream:
    """Iterate over it for chunks; leave the iteration early, or the context, to cancel.

    stream = await client.stream("def add(a, b):")
    async for chunk in stream:
        print(chunk.text, end="")
    print(stream.completion.usage)

    `async with stream:` around the loop waits until a cancelled session has been told so; without it a `break` cancels
    in the background.
    """

    def __init__(self, chunks: Chunks, *, prompt_tokens: int, seed: int, statistics: Statistics):
        self._chunks = chunks
        self._pulling = asyncio.Lock()
        """Held while a chunk is awaited: a generator that runs cannot be closed."""
        self._prompt_tokens = prompt_tokens
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._reason: FinishReason | None = None
        self._seed = seed
        self.statistics = statistics

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        finally:
            await self.aclose()

    async def _next(self) -> Chunk | None:
        """The next chunk, None at the end."""
        async with self._pulling:
            item = await anext(self._chunks, None)
        if item is None:
            return None
        chunk, self._reason = item
        self._texts.append(chunk.text)
        self._ids += chunk.token_ids
        return chunk

    async def aclose(self) -> None:
        """Cancel what still runs; a chunk that another task awaits is let come first."""
        async with self._pulling:
            await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def completion(self) -> Completion:
        """All that has come so far; `cancelled` where the sequence had not ended."""
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._ids),
            finish_reason=self._reason or "cancelled",
            usage=Usage(self._prompt_tokens, len(self._ids)),
            seed=self._seed,
            session_id=self.statistics.session_id,
            statistics=self.statistics,
        )

    async def drain(self) -> Completion:
        """Run to the end. Raises the error of a session that no verifier could finish."""
        try:
            async for _ in self:
                pass
        except OutriderError:
            await self.aclose()
            raise
        return self.completion
