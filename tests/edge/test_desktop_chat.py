"""Test the example of a chat in a desktop app, which the page of recipes shows."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reciter import TEXT, Threaded, in_thread, recital

from edge_agent import AsyncClient, EdgeSettings
from examples.desktop_chat import Chat
from outrider.core.errors import Unavailable

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class Window:
    """What a GUI keeps: the texts that were shown, and how each answer ended."""

    def __init__(self, client: AsyncClient) -> None:
        self.shown: queue.Queue[tuple[str, bool]] = queue.Queue()
        self.done: queue.Queue[str] = queue.Queue()
        self.chat = Chat(client, lambda text, verified: self.shown.put((text, verified)), self.done.put)

    def texts(self) -> list[tuple[str, bool]]:
        return [self.shown.get() for _ in range(self.shown.qsize())]


@pytest.fixture
def verifier(tiny_gguf: Path) -> Iterator[Threaded]:
    with in_thread(recital(tiny_gguf)) as running:
        running.verifier.script.max_sequence = 300
        yield running


@pytest.fixture
def window(verifier: Threaded, tmp_path: Path, give_up_after: Callable[[float], None]) -> Iterator[Window]:
    give_up_after(0.5)
    where = {"verifier": verifier.address, "cache_dir": tmp_path}
    made = Window(AsyncClient(**where, offline="draft_only", settings=EdgeSettings()))  # type: ignore[arg-type]
    yield made
    made.chat.close()


def test_an_answer_is_shown_and_is_the_history_of_the_next(window: Window, verifier: Threaded) -> None:
    window.chat.ask("x")
    assert window.done.get(timeout=WAIT_S) == "The answer was cut short."
    shown = window.texts()
    assert "".join(text for text, _ in shown).startswith(TEXT) and all(verified for _, verified in shown)
    window.chat.ask("and now?")
    assert window.done.get(timeout=WAIT_S) == "This conversation is too long. Begin a new one."


def test_a_stop_ends_an_answer_before_its_first_token_and_even_before_it_has_begun(
    window: Window, verifier: Threaded
) -> None:
    window.chat.ask("x")
    window.chat.stop()
    assert window.done.get(timeout=WAIT_S) == "" and window.texts() == []
    window.chat.ask("x")
    window.done.get(timeout=WAIT_S)
    window.texts()
    verifier.verifier.freeze()
    window.chat._history.clear()
    window.chat.ask("x")
    verifier.until_busy()
    window.chat.stop()
    assert window.done.get(timeout=WAIT_S) == "" and window.texts() == []


def test_without_a_verifier_the_draft_writes_and_its_text_is_marked(window: Window, verifier: Threaded) -> None:
    window.chat.ask("x")
    window.done.get(timeout=WAIT_S)
    window.texts()
    window.chat._history.clear()
    verifier.kill()
    window.chat.ask("x")
    assert window.done.get(timeout=WAIT_S).startswith("You are offline")
    assert {verified for _, verified in window.texts()} == {False}


def test_what_fails_is_said_in_the_apps_own_words(window: Window, verifier: Threaded) -> None:
    verifier.verifier.script.refuse = Unavailable("start it, for example with `outrider up`")
    window.chat._client._defaults["offline"] = "raise"
    window.chat.ask("x")
    assert window.done.get(timeout=WAIT_S) == "No connection. Try again."


def test_the_page_shows_the_example() -> None:
    example = (ROOT / "examples/desktop_chat.py").read_text()
    shown = example[example.index("class Chat") : example.index("def main")].rstrip()
    assert f"```python\n{shown}\n```" in (ROOT / "docs/recipes.md").read_text()
