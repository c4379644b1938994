"""Test the chat page in a browser, before `outrider-edge serve` and a real cluster."""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from browser import SPANS, Page, chromium
from serving_process import NOTHING, ready_server, taken, until_live
from system import System

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "Write a Python class for a stack."
LONG = 900
RECORD_FETCH = """
const plain = window.fetch;
window.fetch = async (...asked) => {
  const answer = await plain(...asked);
  if (String(asked[0]).endsWith("completions")) {
    window.asked = asked[1].body;
    answer.clone().text().then(text => { window.received = text; });
  }
  return answer;
};
"""
"""JavaScript that records the page's requests and the answers."""
POINTS = "(document.getElementById('{}').getAttribute('d').match(/[ML]/g) || []).length"
RECORD_CURVE = f"""
window.lengths = [];
const drawn = new MutationObserver(() => window.lengths.push({POINTS.format("acceptance")}));
drawn.observe(document.getElementById("acceptance"), {{attributes: true}});
"""
"""JavaScript that records how many points the curve of acceptance has each time that it is drawn."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def url(system: System, folder: Path) -> AsyncIterator[str]:
    async with ready_server(system, folder) as address:
        yield address


async def last_exchange(page: Page) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the last request, and the choices of its events."""
    await page.until("window.received")
    received = await page.run("return window.received")
    events = [json.loads(line.removeprefix("data: ")) for line in received.split("\n\n") if line.startswith("data: {")]
    return json.loads(await page.run("return window.asked")), [event["choices"][0] for event in events]


def runs_of(choices: list[dict[str, Any]]) -> list[list[str]]:
    """Return the parts of the text by provenance, as the server reports it token by token."""
    decoder, runs = codecs.getincrementaldecoder("utf-8")("replace"), []
    for token in [token for choice in choices for token in choice.get("outrider", {}).get("tokens", [])]:
        text = decoder.decode(bytes(token["bytes"]))
        if text and runs and runs[-1][0] == token["provenance"]:
            runs[-1][1] += text
        elif text:
            runs.append([token["provenance"], text])
    return runs


async def test_an_answer_streams_in_coloured_as_the_server_reports_and_is_plotted(
    settled: System, page: Page, url: str
) -> None:
    await page.open(url)
    await page.until("document.getElementById('model').innerText.includes('draft.gguf')")
    await page.run(RECORD_FETCH + RECORD_CURVE)
    await page.set("temperature", 0)
    await page.set("max_tokens", LONG)
    await page.ask(QUESTION)
    await page.until(f"{SPANS}.length > 3")
    early = await page.text(".answer .said")
    assert await page.run("return getComputedStyle(document.getElementById('stop')).display") != "none"
    await page.until("document.getElementById('rtt-now').innerText.endsWith('ms')")
    text = await page.answered()
    assert len(early) < len(text)
    lengths = await page.run("return window.lengths")
    assert len(set(lengths)) > 2 and lengths == sorted(lengths)
    _, choices = await last_exchange(page)
    assert text == "".join(choice["delta"].get("content", "") for choice in choices)
    runs = runs_of(choices)
    assert await page.runs() == runs and {kind for kind, _ in runs} == {"draft", "target"}
    colours = [await colour(page, kind) for kind in ("draft", "target")]
    assert colours[0] != colours[1] and "rgba(0, 0, 0, 0)" not in colours
    last = choices[-1]["outrider"]["statistics"]
    await page.until(f"document.getElementById('figures').innerText.includes('{last['tokens_per_s']:.1f}')")
    shown = (await page.text("#figures")).split("\n")
    figures = dict(zip(shown[::2], shown[1::2], strict=True))
    assert (figures["tokens"], figures["accepted"]) == (str(LONG), str(last["accepted"]))
    assert await page.run(f"return {POINTS.format('rtt')}") > 3
    assert await page.complaints() == []
    assert await page.hosts() == {urlsplit(url).netloc}


async def colour(page: Page, kind: str) -> str:
    return await page.run(f"return getComputedStyle(document.querySelector('.said .{kind}')).backgroundColor")


async def test_stopping_frees_the_verifiers_place_and_the_page_goes_on(settled: System, page: Page, url: str) -> None:
    await page.open(url)
    await page.set("temperature", 0)
    await page.set("max_tokens", LONG)
    await page.ask(QUESTION)
    await until_live(settled, 1)
    await page.until(f"{SPANS}.length > 3")
    await page.click("#stop")
    said = await page.answered()
    assert "ended early" in await page.text(".answer .after")
    assert await taken(settled) == NOTHING
    assert await page.run("return document.querySelector('.answer .said').textContent") == said
    await page.run(RECORD_FETCH)
    await page.set("max_tokens", 8)
    await page.ask("And then?")
    assert await page.answered()
    asked, _ = await last_exchange(page)
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["messages"][1]["content"] == said  # what was said before the stop was said


async def test_a_page_that_is_closed_frees_the_verifiers_place(settled: System, page: Page, url: str) -> None:
    await page.open(url)
    await page.set("temperature", 0)
    await page.set("max_tokens", LONG)
    await page.ask(QUESTION)
    await until_live(settled, 1)
    await page.open("about:blank")
    assert await taken(settled) == NOTHING


async def test_a_verifier_that_dies_in_the_middle_is_not_noticed(settled: System, page: Page, url: str) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 600}
    async with httpx.AsyncClient(base_url=url, timeout=60) as web:
        whole = (await web.post("v1/chat/completions", json=asked)).json()["choices"][0]["message"]["content"]
    await settled.until_status(lambda status: not any(v.telemetry.live_sessions for v in status.verifiers))
    await page.open(url)
    await page.set("temperature", 0)
    await page.set("max_tokens", 600)
    await page.ask(QUESTION)
    await page.until(f"{SPANS}.length > 3")
    await until_live(settled, 1)
    busy = next(v.address for v in (await settled.status()).verifiers if v.telemetry.live_sessions)
    await settled.verifier_at(busy).kill()
    settled.replace_in_background()
    assert await page.answered() == whole
    assert "verifiers used" in await page.text("#figures")
    assert await page.run("return document.querySelectorAll('[role=alert]').length") == 0
