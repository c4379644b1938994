"""An event loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from outrider.core.errors import BadRequest

_A = TypeVar("_A")


class LoopThread:
    """Runs coroutines for threads that wait. resident: entered when the loop begins, left when it ends."""

    def __init__(self, resident: AbstractAsyncContextManager[object], name: str) -> None:
        self._resident = resident
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._ending = asyncio.Event()
        self._unawaited: set[asyncio.Future[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)
        self._thread.start()
        self._begun.wait()

    def run(self, work: Coroutine[Any, Any, _A]) -> _A:
        """What it returns or raises. Whatever interrupts the waiting, as Ctrl-C does, cancels it.

        Raises BadRequest once the loop has ended, and on the loop's own thread, which cannot wait for itself.
        """
        future = self._submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        except BaseException:
            future.cancel()  # of no effect on one that is done
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """As `run`, for what frees something: without waiting on the loop's own thread, nothing once it has ended."""
        if threading.current_thread() is self._thread:  # the garbage collector's doing
            self._unawaited.add(task := asyncio.ensure_future(work))
            task.add_done_callback(self._unawaited.discard)
            return
        with contextlib.suppress(BadRequest):
            self.run(work)

    def stop(self) -> None:
        """End the loop, and wait until it has."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(self._ending.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, _A]) -> concurrent.futures.Future[_A]:
        if threading.current_thread() is self._thread:
            work.close()
            raise BadRequest("a blocking client cannot be used on its own event loop; use AsyncClient there")
        try:
            if self._loop is None or not self._thread.is_alive():
                raise RuntimeError
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise _closed() from None

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._resident:
            self._begun.set()
            await self._ending.wait()


def _closed() -> BadRequest:
    return BadRequest("the client is closed; make another one")
