"""Serve code that blocks: `Client` runs `AsyncClient` on an event loop in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from edge_agent.metrics import EdgeMetrics
from edge_agent.releases.follower import Follower
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream, ItemStream
from edge_agent.sdk.skeleton import SkeletonStream
from edge_agent.sdk.types import Chunk, Completion, Skeleton, SkeletonPoint
from edge_agent.session.statistics import Statistics
from edge_agent.target.detokenizer import StopScanner
from outrider.core.errors import BadRequest

_A = TypeVar("_A")
_B = TypeVar("_B")
_P = ParamSpec("_P")
_S = TypeVar("_S", bound=ItemStream[Any])


class _Loop:
    """The event loop of a client, on a thread of its own; other threads wait for its coroutines through a portal."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._running = start_blocking_portal(name="outrider-client")
        self._portal = self._running.__enter__()
        self._thread_id = self._portal.call(threading.get_ident)

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
        """Run a clean-up, but not once the loop has ended."""
        if not self._elsewhere(self.finish, work):
            with contextlib.suppress(BadRequest):
                self.run(work)

    def stop(self) -> None:
        """Close the client and end the loop, and wait until it has ended."""
        if not self._elsewhere(self.stop):
            self.finish(self._close())
            self._running.__exit__(None, None, None)

    def _elsewhere(self, work: Callable[..., None], *arguments: object) -> bool:
        """Start work on another thread if this is the loop's, which the garbage collector may call; return whether."""
        if self._is_own_thread:
            threading.Thread(target=work, args=arguments, name="outrider-client-end", daemon=True).start()
        return self._is_own_thread

    async def _close(self) -> None:
        await self._client.close()
        await self._portal.stop(cancel_remaining=True)

    @property
    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread_id


class _BlockingIterator(Generic[_S, _A]):
    """A request that runs: iterate over it, or call `next` until it returns None."""

    def __init__(self, stream: _S, loop: _Loop) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Iterator[_A]:
        with self:
            while (item := self.next()) is not None:
                yield item

    def next(self) -> _A | None:
        """Wait for the next item; None at the end. Call `close` to leave before it."""
        item: _A | None = self._loop.run(self._stream.next())
        return item

    def close(self) -> None:
        """Cancel the request, once an item that another thread awaits has come."""
        self._loop.finish(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingStream(_BlockingIterator[CompletionStream, Chunk]):
    """A request that runs, as `Client.stream` returns it: iterate over it for chunks.

    `next` and `close` are as `next` and `aclose` of CompletionStream. Leaving the iteration early, or the context,
    cancels the request. `with stream:` around the loop cancels at its end at the latest; without it a `break` does so
    when the iterator is collected, which CPython does at once.
    """

    @property
    def statistics(self) -> Statistics:
        """Return the counts of what has come so far; they are live."""
        return self._stream.statistics

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Return the prompt's token ids. They may be given as a prompt again, which saves tokenising it."""
        return self._stream.prompt_token_ids

    @property
    def completion(self) -> Completion:
        """Return the output so far; its `finish_reason` is "cancelled" if the output had not ended."""
        return self._stream.completion

    def read_as(self, texts: Collection[str], stops: StopScanner | None = None) -> None:
        """Make special tokens with these texts part of the text. Call it before the first chunk is taken.

        stops: finds where the output ends, in place of the request's stop texts.
        """
        self._stream.read_as(texts, stops)

    def drain(self) -> Completion:
        """Run to the end, and return the completion. Raises the error of a request that no verifier could finish."""
        return self._loop.run(self._stream.drain())


class BlockingSkeleton(_BlockingIterator[SkeletonStream, SkeletonPoint]):
    """A skeleton that is being written, as `Client.stream_skeleton` returns it: iterate over it for its points.

    It has `next` and `close`, and leaving the iteration early, or the context, cancels all requests.
    """

    @property
    def skeleton(self) -> Skeleton:
        """Return the outline and the points that have come so far."""
        return self._stream.skeleton

    def drain(self) -> Skeleton:
        """Run to the end, and return the skeleton. Raises the error of the first point that fails."""
        return self._loop.run(self._stream.drain())


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _A]], result: Callable[[_A, _Loop], _B]
) -> Callable[Concatenate[Client, _P], _B]:
    """Return the method of Client that waits for one of AsyncClient. result: makes what is returned."""

    @functools.wraps(method)
    def waiting(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _B:
        return result(self._loop.run(method(self._client, *args, **kwargs)), self._loop)

    if isinstance(result, type):
        shown = inspect.signature(method).replace(return_annotation=result.__name__)
        waiting.__signature__ = shown  # type: ignore[attr-defined]
        waiting.__annotations__ = {**method.__annotations__, "return": result.__name__}
    return waiting


def _same(result: _A, _: _Loop) -> _A:
    return result


def _arguments_of(
    init: Callable[Concatenate[AsyncClient, _P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Client, _P], None]]:
    """Return a decorator that gives a constructor the arguments of another one, for readers and type checkers."""
    return functools.wraps(init)


class Client:
    """A client for code that blocks, with the arguments, methods, types and errors of AsyncClient. A context manager.

        from outrider import Client

        with Client(coordinator="127.0.0.1:7700") as client:
            print(client.generate("def add(a, b):", max_tokens=64).text)
            with client.stream("def add(a, b):", max_tokens=64) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)

    `stream` and `stream_chat` return a BlockingStream, `stream_skeleton` a BlockingSkeleton. Any number of threads may
    share one client. Ctrl-C cancels the request that its thread waits for. The end of the process closes a client that
    is still open.
    """

    @_arguments_of(AsyncClient.__init__)
    def __init__(self, **arguments: Any) -> None:
        self._client = AsyncClient(**arguments)
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

    generate = _blocking(AsyncClient.generate, _same)
    stream = _blocking(AsyncClient.stream, BlockingStream)
    chat = _blocking(AsyncClient.chat, _same)
    stream_chat = _blocking(AsyncClient.stream_chat, BlockingStream)
    skeleton = _blocking(AsyncClient.skeleton, _same)
    stream_skeleton = _blocking(AsyncClient.stream_skeleton, BlockingSkeleton)
    prepare = _blocking(AsyncClient.prepare, _same)
    probe = _blocking(AsyncClient.probe, _same)

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

    @property
    def writes_offline(self) -> bool:
        """Return whether the draft model answers requests alone while no verifier can be reached."""
        return self._client.writes_offline
