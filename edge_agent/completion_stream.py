"""One request while it runs: chunks as they come, the whole when they have come."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from edge_agent.completion import Chunk, Completion, FinishReason
from edge_agent.statistics import Statistics, Usage
from outrider.core.errors import OutriderError

Chunks = AsyncGenerator[tuple[Chunk, FinishReason | None], None]


class CompletionStream:
    """Iterate over it for chunks; leave the iteration early, or the context, to cancel.

    async with client.stream("def add(a, b):") as stream:
        async for chunk in stream:
            print(chunk.text, end="")
    print(stream.completion.usage)
    """

    def __init__(self, chunks: Chunks, *, prompt_tokens: int, seed: int, statistics: Statistics):
        self._chunks = chunks
        self._prompt_tokens = prompt_tokens
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._reason: FinishReason | None = None
        self._seed = seed
        self.statistics = statistics

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        chunk, reason = await self._chunks.__anext__()
        self._texts.append(chunk.text)
        self._ids += chunk.token_ids
        self._reason = reason
        return chunk

    async def aclose(self) -> None:
        """Cancel what still runs; afterwards the verifier holds nothing of the session."""
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
