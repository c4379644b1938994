"""Serve code that blocks: `Client` runs `AsyncClient` on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from anyio.from_thread import start_blocking_portal

from edge_agent.config import EdgeSettings
from edge_agent.metrics import EdgeMetrics
from edge_agent.releases.follower import Follower
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.skeleton import SkeletonStream
from edge_agent.sdk.types import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT,
    Chunk,
    Completion,
    Offline,
    Options,
    Prompt,
    Skeleton,
    SkeletonPoint,
    Timeout,
)
from edge_agent.session.statistics import Statistics
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.chat_template import Message
from outrider.core.errors import BadRequest
from outrider.wire.channels import ClientTls

_A = TypeVar("_A")


class Client:
    """A client for code that blocks, with the arguments, methods, types and errors of AsyncClient. A context manager.

        from edge_agent import Client

        with Client(coordinator="127.0.0.1:7700") as client:
            print(client.generate("def add(a, b):", max_tokens=64).text)
            with client.stream("def add(a, b):", max_tokens=64) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)

    Any number of threads may share one. Ctrl-C cancels the request that its thread waits for. The end of the process
    closes a client that is still open.
    """

    def __init__(
        self,
        *,
        coordinator: str | None = None,
        verifier: str | None = None,
        target: str | None = None,
        draft: str | Path | Sequence[str | Path] | None = "auto",
        api_key: str | None = None,
        tls: ClientTls | None = None,
        insecure: bool | None = None,
        cache_dir: str | Path | None = None,
        reroute: Mapping[str, str] | None = None,
        traffic_class: str = "",
        timeout: Timeout | float | None = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        offline: Offline = "raise",
        settings: EdgeSettings | None = None,
    ) -> None:
        self._client = AsyncClient(
            coordinator=coordinator,
            verifier=verifier,
            target=target,
            draft=draft,
            api_key=api_key,
            tls=tls,
            insecure=insecure,
            cache_dir=cache_dir,
            reroute=reroute,
            traffic_class=traffic_class,
            timeout=timeout,
            retries=retries,
            offline=offline,
            settings=settings,
        )
        self._loop = _Loop(self._client)
        self._end = weakref.finalize(self, self._loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests, free the draft and close the connections.

        Requests that hold a slot end as cancelled; those that wait for one, and later ones, raise BadRequest.
        """
        self._end()

    @property
    def updates(self) -> Follower | None:
        """Return the follower that keeps the draft up to date; None unless releases are followed."""
        return self._client.updates

    @property
    def metrics(self) -> EdgeMetrics:
        """Return counts of the client's requests, for Prometheus."""
        return self._client.metrics

    @property
    def ready(self) -> bool:
        """Return whether what the target needs is loaded."""
        return self._client.ready

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole completion of a text or of token ids; Options explains the keyword arguments."""
        return self._loop.run(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> BlockingStream:
        """Return the completion in chunks, as the verifier commits them."""
        return BlockingStream(self._loop.run(self._client.stream(prompt, **options)), self._loop)

    def chat(
        self, messages: Sequence[Message], template: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Return the assistant's answer to messages with `role` and `content`, in the target's own template.

        template: further variables of the template, such as `tools` or `enable_thinking`.
        """
        return self._loop.run(self._client.chat(messages, template, **options))

    def stream_chat(
        self, messages: Sequence[Message], template: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> BlockingStream:
        """Return the assistant's answer in chunks. Raises ModelRefused for a target without a chat template."""
        return BlockingStream(self._loop.run(self._client.stream_chat(messages, template, **options)), self._loop)

    def skeleton(
        self,
        messages: Sequence[Message],
        template: Mapping[str, Any] | None = None,
        *,
        points: int = 8,
        parallel: int = 4,
        **options: Unpack[Options],
    ) -> Skeleton:
        """Return an answer that is written as an outline, with its points then expanded side by side.

        This changes the answer. `AsyncClient.skeleton` explains the arguments.
        """
        work = self._client.skeleton(messages, template, points=points, parallel=parallel, **options)
        return self._loop.run(work)

    def stream_skeleton(
        self,
        messages: Sequence[Message],
        template: Mapping[str, Any] | None = None,
        *,
        points: int = 8,
        parallel: int = 4,
        **options: Unpack[Options],
    ) -> BlockingSkeleton:
        """Return the points of `skeleton` as they finish. Raises ModelRefused for a target without a chat template."""
        work = self._client.stream_skeleton(messages, template, points=points, parallel=parallel, **options)
        return BlockingSkeleton(self._loop.run(work), self._loop)

    def prepare(self) -> TargetBundle:
        """Fetch and load what the target needs, once; otherwise the first request does it.

        `draft` of the result is the one in use now. A caller that is cancelled does not stop the loading.
        """
        return self._loop.run(self._client.prepare())

    def probe(self) -> None:
        """Ask the coordinator for a place, and its verifier for the target, without waiting or trying for long.

        Raises what a request would raise now: Unavailable if either cannot be reached, Overloaded for a full cluster.
        """
        self._loop.run(self._client.probe())


class BlockingStream:
    """A request that runs, as `Client.stream` returns it: iterate over it for chunks.

    Leaving the iteration early, or the context, cancels the request. `with stream:` around the loop cancels at its end
    at the latest; without it a `break` does so when the iterator is collected, which CPython does at once.
    """

    def __init__(self, stream: CompletionStream, loop: _Loop) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Iterator[Chunk]:
        with self:
            while (chunk := self.next()) is not None:
                yield chunk

    def next(self) -> Chunk | None:
        """Wait for the next chunk; None at the end. Call `close` to leave before it."""
        return self._loop.run(self._stream.next())

    def close(self) -> None:
        """Cancel the request, once a chunk that another thread awaits has come."""
        self._loop.finish(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def statistics(self) -> Statistics:
        """Return the counts of what has come so far; they are live."""
        return self._stream.statistics

    def show_special(self, texts: Collection[str]) -> None:
        """Make special tokens with these texts part of the text. Call it before the first chunk is taken."""
        self._stream.show_special(texts)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Return the prompt's token ids. They may be given as a prompt again, which saves tokenising it."""
        return self._stream.prompt_token_ids

    @property
    def completion(self) -> Completion:
        """Return the output so far; its `finish_reason` is "cancelled" if the output had not ended."""
        return self._stream.completion

    def drain(self) -> Completion:
        """Run to the end, and return the completion. Raises the error of a request that no verifier could finish."""
        return self._loop.run(self._stream.drain())


class BlockingSkeleton:
    """A skeleton that is being written, as `Client.stream_skeleton` returns it: iterate over it for its points.

    It behaves as SkeletonStream does. Leaving the iteration early, or the context, cancels all requests.
    """

    def __init__(self, stream: SkeletonStream, loop: _Loop) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Iterator[SkeletonPoint]:
        with self:
            while (point := self.next()) is not None:
                yield point

    def next(self) -> SkeletonPoint | None:
        """Wait for the next point that ends; None after the last. Raises the error of the outline's request."""
        return self._loop.run(self._stream.next())

    def close(self) -> None:
        """Cancel all requests, once a point that another thread awaits has come."""
        self._loop.finish(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def skeleton(self) -> Skeleton:
        """Return the outline and the points that have come so far."""
        return self._stream.skeleton

    def drain(self) -> Skeleton:
        """Run to the end, and return the skeleton. Raises the error of the first point that fails."""
        return self._loop.run(self._stream.drain())


class _Loop:
    """The event loop of a client, on a thread of its own; other threads wait for its coroutines through a portal."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._running = start_blocking_portal(name="outrider-client")
        self._portal = self._running.__enter__()
        self._thread_id = self._portal.call(threading.get_ident)
        self._unawaited: set[asyncio.Future[None]] = set()

    def run(self, work: Coroutine[Any, Any, _A]) -> _A:
        """Return the coroutine's result, or raise its error; an interrupt of the waiting, as by Ctrl-C, cancels it.

        Raises BadRequest once the loop has ended, and on the loop's own thread, which cannot wait for itself.
        """
        if self._is_own_thread:
            work.close()
            raise BadRequest("a blocking client cannot be used on its own event loop; use AsyncClient there")
        closed = BadRequest("the client is closed; make another one")
        try:
            future: concurrent.futures.Future[_A] = self._portal.start_task_soon(lambda: work)
        except RuntimeError:
            work.close()
            raise closed from None
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed from None
        except BaseException:
            future.cancel()  # without effect if it is done
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a clean-up: without waiting on the loop's own thread, and not at all once the loop has ended."""
        if self._is_own_thread:  # called by the garbage collector
            self._unawaited.add(task := asyncio.ensure_future(work))
            task.add_done_callback(self._unawaited.discard)
            return
        with contextlib.suppress(BadRequest):
            self.run(work)

    def stop(self) -> None:
        """Close the client and end the loop, and wait until it has ended."""
        if self._is_own_thread:  # the garbage collector runs there, and the thread cannot wait for its own end
            threading.Thread(target=self.stop, name="outrider-client-end", daemon=True).start()
            return
        with contextlib.suppress(BadRequest):
            self.run(self._close())
        self._running.__exit__(None, None, None)

    async def _close(self) -> None:
        await self._client.close()
        await self._portal.stop(cancel_remaining=True)

    @property
    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread_id
