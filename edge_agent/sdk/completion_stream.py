"""One request while it runs: chunks as they come, the whole when they have come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from edge_agent.sdk.timeout import Deadline
from edge_agent.sdk.types import Chunk, Completion, FinishReason
from edge_agent.session.statistics import Statistics, Usage
from outrider.core.errors import OutriderError
from outrider.core.protocol.messages import TokenLogprobs

Chunks = AsyncGenerator[tuple[Chunk, FinishReason | None], None]


class CompletionStream:
    """Of `AsyncClient.stream`: iterate over it for chunks; leave the iteration early, or the context, to cancel.

    `async with stream:` around the loop waits until a cancelled session has been told so; without it a `break` cancels
    in the background. `statistics` are live: those of what has come so far, as is `completion`.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        prompt_token_ids: tuple[int, ...],
        seed: int,
        statistics: Statistics,
        deadline: Deadline,
    ) -> None:
        self._chunks = chunks
        self._pulling = asyncio.Lock()
        """Held while a chunk is awaited: a generator that runs cannot be closed."""
        self._prompt_token_ids = prompt_token_ids
        self._deadline = deadline
        self._taken: list[Chunk] = []
        self._reason: FinishReason | None = None
        self._seed = seed
        self.statistics = statistics

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while (chunk := await self.next()) is not None:
                yield chunk
        finally:
            await self.aclose()

    async def next(self) -> Chunk | None:
        """The next chunk, None at the end; whoever leaves before it calls `aclose`."""
        async with self._pulling, self._deadline.holds(first_token=not self._taken):
            item = await anext(self._chunks, None)
        if item is None:
            return None
        chunk, self._reason = item
        self._taken.append(chunk)
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
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the target reads it. Given as a prompt they mean the same, and are not made anew."""
        return self._prompt_token_ids

    @property
    def completion(self) -> Completion:
        """All that has come so far; `cancelled` where the sequence had not ended."""
        chunks = self._taken
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=token_ids,
            drafted=tuple(own for chunk in chunks for own in chunk.drafted),
            verified=all(chunk.verified for chunk in chunks),
            logprobs=_together(chunks),
            finish_reason=self._reason or "cancelled",
            usage=Usage(len(self._prompt_token_ids), len(token_ids)),
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


def _together(chunks: Sequence[Chunk]) -> tuple[TokenLogprobs, ...] | None:
    """None where they were not asked for."""
    if not chunks or any(chunk.logprobs is None for chunk in chunks):
        return None
    return tuple(one for chunk in chunks for one in chunk.logprobs or ())
