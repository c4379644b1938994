"""`CompletionStream` for callers that block."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from edge_agent.sdk.completion_stream import CompletionStream
from edge_agent.sdk.loop_thread import LoopThread
from edge_agent.sdk.types import Chunk, Completion
from edge_agent.session.statistics import Statistics


class BlockingStream:
    """Of `Client.stream`: iterate over it for chunks; leave the iteration early, or the context, to cancel.

    `with stream:` around the loop cancels at its end at the latest; without it a `break` does so where the iteration is
    collected, which CPython does at once.
    """

    def __init__(self, stream: CompletionStream, thread: LoopThread) -> None:
        self._stream = stream
        self._thread = thread

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunk := self.next()) is not None:
                yield chunk
        finally:
            self.close()

    def next(self) -> Chunk | None:
        """The next chunk, None at the end; whoever leaves before it calls `close`."""
        return self._thread.run(self._stream.next())

    def close(self) -> None:
        """Cancel what still runs; a chunk that another thread awaits is let come first."""
        self._thread.finish(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def statistics(self) -> Statistics:
        """Live: those of what has come so far."""
        return self._stream.statistics

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the target reads it. Given as a prompt they mean the same, and are not made anew."""
        return self._stream.prompt_token_ids

    @property
    def completion(self) -> Completion:
        """All that has come so far; `cancelled` where the sequence had not ended."""
        return self._stream.completion

    def drain(self) -> Completion:
        """Run to the end. Raises the error of a session that no verifier could finish."""
        return self._thread.run(self._stream.drain())
