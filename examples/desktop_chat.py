"""Chat from a program with a GUI: the client has an event loop on a thread of its own.

OUTRIDER_EDGE_COORDINATOR=127.0.0.1:7700 python -m examples.desktop_chat "What is gravity?"
"""

import asyncio
import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Callable

from outrider import (
    AsyncClient,
    BadRequest,
    OutriderError,
    Overloaded,
    PermissionDenied,
    TimedOut,
    Timeout,
    Unauthenticated,
    Unavailable,
)


class Chat:
    """One conversation. Call `ask`, `stop` and `close` on the GUI's thread; only `close` waits."""

    def __init__(self, client: AsyncClient, show: Callable[[str, bool], object], done: Callable[[str], object]) -> None:
        """show: gets each text, and whether it is verified. done: gets what to tell the user at the end, mostly "".

        Both are called on the loop's thread: with Qt, pass the `emit` of signals.
        """
        self._client, self._show, self._done = client, show, done
        self._history: list[dict[str, str]] = []
        self._answer: asyncio.Task[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._prepare(), self._loop)

    def ask(self, question: str) -> None:
        """Begin an answer, once the one before is done."""
        self._loop.call_soon_threadsafe(self._begin, question)

    def stop(self) -> None:
        """End the answer at once, also before its first token."""
        self._loop.call_soon_threadsafe(lambda: self._answer and self._answer.cancel())

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _prepare(self) -> None:
        with contextlib.suppress(OutriderError):  # the first question tries again, and says why
            await self._client.prepare()

    def _begin(self, question: str) -> None:
        self._answer = self._loop.create_task(self._answered(question))
        self._answer.add_done_callback(lambda task: self._done("" if task.cancelled() else task.result()))

    async def _answered(self, question: str) -> str:
        """Show the answer, and return what to tell the user."""
        messages, text = [*self._history, {"role": "user", "content": question}], ""
        try:
            await self._client.prepare()  # the first time it downloads the draft, which may take minutes
            timeout = Timeout(first_token=60)
            async with await self._client.stream_chat(messages, max_tokens=1024, timeout=timeout) as stream:
                async for chunk in stream:
                    text += chunk.text
                    self._show(chunk.text, chunk.verified)
            if not stream.completion.verified:
                return "You are offline: a small model on this computer wrote this."
            return "The answer was cut short." if stream.completion.finish_reason == "length" else ""
        except OutriderError as error:
            logging.warning("an answer failed: %r", error)  # its text is for you, not for your users
            return words_for(error)
        finally:
            if text:  # the next question may be about an answer that was stopped, too
                self._history = [*messages, {"role": "assistant", "content": text}]


def words_for(error: OutriderError) -> str:
    """Return what to tell the user."""
    match error:
        case BadRequest(field="length of prompt"):
            return "This conversation is too long. Begin a new one."
        case Unauthenticated() | PermissionDenied():
            return "Sign in again."
        case Overloaded():
            return "Many people are asking just now. Try again in a minute."
        case Unavailable() | TimedOut():
            return "No connection. Try again."
    return "Something went wrong."


def main() -> None:
    ended = queue.Queue[str]()

    def show(text: str, verified: bool) -> None:
        print(text if verified else f"\033[2m{text}\033[0m", end="", flush=True)  # dim

    chat = Chat(AsyncClient(offline="draft_only"), show, ended.put)
    chat.ask(" ".join(sys.argv[1:]) or "What is gravity?")
    said = ended.get()
    print()
    print(said, file=sys.stderr)
    chat.close()


if __name__ == "__main__":
    main()
