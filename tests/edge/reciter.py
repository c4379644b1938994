"""Fake a verifier that recites one text, with the tiny draft to offer, on a thread for tests that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fake_verifier import FakeVerifier, Script
from scripted import tokenizer_json

from edge_agent.target.tokenizer import TargetTokenizer

TEXT = "def grüße(name):\n    return f'Grüße, {name}! 🙂'\n\nprint(grüße('Welt'))\n"
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def reciting(tokens: Sequence[int]) -> Callable[[Sequence[int]], int]:
    """Return a target that recites the same text over and over, whatever the prompt's length."""

    def target(sequence: Sequence[int]) -> int:
        for length in range(min(len(sequence), len(tokens)), -1, -1):
            if list(sequence[len(sequence) - length :]) == list(tokens[:length]):
                return tokens[length % len(tokens)]
        return tokens[0]

    return target


def recital(draft: Path | None = None, text: str = TEXT) -> Script:
    """Return a script that recites. draft: the GGUF that it offers."""
    tokenizer = TargetTokenizer(tokenizer_json())
    artifacts = {"template": TEMPLATE.encode()}
    if draft is not None:
        artifacts["draft"] = draft.read_bytes()
    return Script(
        reciting(tokenizer.encode_plain(text)),
        vocabulary_size=len(tokenizer.table),
        tokenizer_json=tokenizer_json(),
        artifacts=artifacts,
        chunk_bytes=100_000,
    )


class Threaded:
    """Run a fake verifier whose event loop has a thread of its own."""

    def __init__(self, verifier: FakeVerifier, loop: asyncio.AbstractEventLoop) -> None:
        self.verifier = verifier
        self._loop = loop

    @property
    def address(self) -> str:
        return self.verifier.address

    def kill(self) -> None:
        asyncio.run_coroutine_threadsafe(self.verifier.kill(), self._loop).result(60)

    def call(self, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(work)

    def until_free(self) -> None:
        """Wait until no session is live."""
        self._until(lambda: not self.verifier.live)

    def until_busy(self) -> None:
        """Wait until one is."""
        self._until(lambda: bool(self.verifier.live))

    def _until(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < give_up, "a session was not opened, or not cancelled"
            time.sleep(0.01)


@contextlib.contextmanager
def in_thread(script: Script) -> Iterator[Threaded]:
    begun: list[Threaded] = []
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with FakeVerifier(script) as verifier:
            begun.append(Threaded(verifier, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield begun[0]
    finally:
        begun[0].call(done.set)
        thread.join(60)
