"""Test the chat page in a browser, before a scripted target: what it shows of texts, errors and turns, and to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium
from fake_verifier import FakeVerifier
from reciter import TEXT, recital
from saying import ARGUMENTS, WEATHER, Says
from saying import TEXT as SAID
from scripted import tokenizer_json
from selenium.webdriver.common.keys import Keys

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.options import ServeOptions
from edge_agent.http.serve import serving
from edge_agent.target.tokenizer import TargetTokenizer

LOCAL = "127.0.0.1:0"
HOSTILE = "<img src=x onerror=\"window.ran=1\"><script>window.ran=1</script><a href='javascript:window.ran=1'>x</a>\n"
LONG = 3000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


def prompt_of(verifier: FakeVerifier) -> str:
    """Return the last prompt that the target received."""
    table = TargetTokenizer(tokenizer_json()).table
    return b"".join(table[token] for token in verifier.opens[-1].attach.prompt).decode()


# --- texts


async def test_text_of_the_target_and_of_people_is_never_markup(
    page: Page, url: str, verifier: FakeVerifier, tiny_gguf: Path
) -> None:
    verifier.script.target = recital(tiny_gguf, HOSTILE).target
    await page.open(url)
    await page.set("max_tokens", 200)
    await page.ask(HOSTILE.strip())
    assert (await page.answered()).startswith(HOSTILE)
    assert await page.run("return document.querySelector('.you .said').textContent") == HOSTILE.strip()
    assert await page.run("return document.querySelectorAll('#turns :is(img, script, a)').length") == 0
    assert await page.run("return window.ran") is None
    assert await page.complaints() == []


async def test_markup_that_came_in_all_the_same_would_not_run(page: Page, url: str) -> None:
    await page.open(url)
    await page.run("document.getElementById('turns').innerHTML = arguments[0]", HOSTILE)
    await page.run(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    )
    await page.run("document.querySelector('#turns a').click()")
    assert await page.run("return window.ran") is None
    assert all("Content Security Policy" in complaint for complaint in await page.complaints())


async def test_characters_of_several_tokens_are_whole(page: Page, url: str) -> None:
    await page.open(url)
    await page.set("max_tokens", 150)
    await page.ask("x")
    text = await page.answered()
    assert text.startswith(TEXT) and "�" not in text


async def test_reasoning_is_folded_above_the_answer(page: Page, says: Says) -> None:
    async with says("<think>\nKöln <b>hm</b>.\n</think>\n\nLet me see: 5 < 7 €.") as (openai, _):
        await page.open(str(openai.base_url).removesuffix("v1/"))
        await page.ask("x")
        assert await page.answered() == "Let me see: 5 < 7 €."
        assert {kind for kind, _ in await page.runs()} == {"target"}
        fold = "document.querySelector('.answer .fold')"
        assert await page.run(f"return [{fold}.open, {fold}.innerText]") == [False, "Reasoning"]
        await page.click(".answer .fold summary")
        assert await page.run(f"return {fold}.lastChild.innerText.trim()") == "Köln <b>hm</b>."
        assert await page.complaints() == []


async def test_calls_of_tools_are_folded(page: Page, says: Says) -> None:
    """The page itself offers no tools, so its request gets them here."""
    offered = (
        "const send = window.fetch; window.fetch = (path, given = {}) => send(path, !given.body ? given : {...given, "
    )
    offered += "body: JSON.stringify({...JSON.parse(given.body), tools: arguments_tools})});"
    async with says(SAID) as (openai, _):
        await page.open(str(openai.base_url).removesuffix("v1/"))
        await page.run(offered.replace("arguments_tools", json.dumps([WEATHER])))
        await page.ask("x")
        assert (await page.answered()).strip() == "Let me see."
        folds = "return [...document.querySelectorAll('.answer .fold')].map(one => one.textContent)"
        assert [text.strip() for text in await page.run(folds)] == [
            "ReasoningKöln, hm.",
            *[f"Call of weather{ARGUMENTS}"] * 2,
        ]


# --- turns


async def test_what_was_said_goes_along_with_what_is_asked_next(page: Page, url: str, verifier: FakeVerifier) -> None:
    await page.open(url)
    await page.set("max_tokens", 12)
    await page.set("system", "Be brief.")
    await page.ask("first")
    first = await page.answered()
    await page.ask("second")
    await page.answered()
    # The fake's template has no roles; those of a real one are tested with a real one.
    assert (
        prompt_of(verifier)
        == f"<|user|>Be brief.<|end|><|user|>first<|end|><|user|>{first}<|end|><|user|>second<|end|>"
    )
    await page.click("#clear")
    await page.ask("third")
    await page.answered()
    assert prompt_of(verifier) == "<|user|>Be brief.<|end|><|user|>third<|end|>"


async def test_asking_again_takes_the_last_answer_out(page: Page, url: str, verifier: FakeVerifier) -> None:
    await page.open(url)
    await page.set("max_tokens", 5)
    await page.ask("x")
    await page.answered()
    before = prompt_of(verifier)
    await page.click(".answer:last-child .again")
    await page.answered()
    assert prompt_of(verifier) == before and len(verifier.opens) == 2
    assert await page.run("return document.querySelectorAll('.turn').length") == 2


async def test_settings_reach_the_target_and_empty_ones_are_the_servers(
    page: Page, url: str, verifier: FakeVerifier
) -> None:
    await page.open(url)
    for name, value in {"temperature": 0, "top_p": 0.5, "max_tokens": 3, "seed": 9}.items():
        await page.set(name, value)
    await page.ask("x")
    await page.answered()
    attach = verifier.opens[-1].attach
    assert (attach.sampling.temperature, attach.sampling.top_p, attach.sampling.seed) == (0.0, 0.5, 9)
    assert attach.max_tokens == 3
    assert "most tokens" in await page.text(".answer:last-child .after")
    assert await page.text(".answer:last-child .seed") == "seed 9"
    await page.set("temperature", "")
    await page.set("seed", "")
    await page.click(".answer:last-child .again")
    await page.answered()
    sampling = verifier.opens[-1].attach.sampling
    assert sampling.temperature == 1.0
    assert await page.text(".answer:last-child .seed") == f"seed {sampling.seed}"
    for name, wrong, bounds in (
        ("temperature", 2.1, "from 0 to 2"),
        ("top_p", 1.5, "from 0 to 1"),
        ("max_tokens", 0, "at least 1"),
        ("seed", 2**53, f"from 0 to {2**53 - 1}"),
    ):
        before = await page.run("const box = document.getElementById(arguments[0]); return box.value", name)
        await page.set(name, wrong)
        await page.ask("y")
        await page.until("document.querySelector('.answer:last-child [role=alert]')")
        assert await page.text(".answer:last-child [role=alert]") == f"{name} is {wrong}, must be {bounds}"
        await page.set(name, before)
    assert len(verifier.opens) == 2  # nothing of this was sent
    await page.set("temperature", -1)
    await page.click(".answer:last-child .again")
    await page.answered()
    assert "temperature" in await page.text(".answer:last-child [role=alert]")


# --- errors


async def test_a_key_is_asked_for_in_words_and_used(page: Page, client: AsyncClient) -> None:
    async with serving(client, ServeOptions(LOCAL, api_key="sesame")) as url:
        await page.open(url)
        await page.until("document.getElementById('settings').open")
        assert "API key" in await page.text("#model")
        await page.ask("x")
        await page.answered()
        assert "wants an API key" in await page.text(".answer:last-child [role=alert]")
        assert await page.run("return document.activeElement.id") == "key"
        await page.press("sesame")
        await page.set("max_tokens", 5)
        await page.click(".answer:last-child .again")
        assert await page.answered() == TEXT[:5]
        await page.until("document.getElementById('model').innerText.startsWith('fake')")


async def test_a_verifier_that_goes_in_the_middle_is_reported_and_what_it_said_stays(
    page: Page, url: str, verifier: FakeVerifier
) -> None:
    verifier.script.step_s = 0.02
    await page.open(url)
    await page.set("max_tokens", LONG)
    await page.ask("x")
    await page.until("document.querySelectorAll('.answer span').length > 2")
    address = verifier.address
    await verifier.kill()
    text = await page.answered()
    assert text == (TEXT * LONG)[: len(text)] != ""
    assert "onnect" in await page.text(".answer:last-child [role=alert]")
    verifier.script.step_s = 0.002
    await verifier.start(address)
    await page.set("max_tokens", 5)
    await page.click(".answer:last-child .again")
    assert await page.answered() == TEXT[:5]


async def test_a_server_that_goes_is_reported_in_words(page: Page, client: AsyncClient) -> None:
    async with serving(client, ServeOptions(LOCAL)) as url:
        await page.open(url)
        await page.until("document.getElementById('model').innerText.startsWith('fake')")
    await page.ask("x")
    await page.answered()
    assert "outrider-edge serve" in await page.text(".answer:last-child [role=alert]")


async def test_a_page_that_is_there_before_the_target_says_so_and_waits(
    page: Page, tmp_path: Path, tiny_gguf: Path, edge_settings: EdgeSettings
) -> None:
    late = FakeVerifier(recital(tiny_gguf))
    await late.start()
    address = late.address
    await late.kill()
    async with (
        AsyncClient(verifier=address, cache_dir=tmp_path, settings=edge_settings) as client,
        serving(client, ServeOptions(LOCAL)) as url,
    ):
        await page.open(url)
        await page.until("/onnect/.test(document.getElementById('model').innerText)")
        await late.start(address)
        await page.until("document.getElementById('model').innerText.startsWith('fake')")
        assert "onnect" not in await page.text("#model")
    await late.kill()


async def test_what_the_draft_says_alone_looks_other_than_the_rest(
    page: Page, url: str, client: AsyncClient, verifier: FakeVerifier
) -> None:
    await verifier.kill()
    client._defaults["offline"] = "draft_only"
    await page.open(url)
    await page.set("max_tokens", 5)
    await page.ask("x")
    await page.answered()
    assert {kind for kind, _ in await page.runs()} == {"alone"}
    assert "wavy" in await page.run("return getComputedStyle(document.querySelector('.said .alone')).textDecoration")


# --- for everybody


async def test_the_keyboard_alone_is_enough(page: Page, url: str, verifier: FakeVerifier) -> None:
    verifier.script.step_s = 0.02
    await page.open(url)
    assert await page.run("return document.activeElement.id") == "text"
    await page.press("one")
    await page.press_with_shift(Keys.ENTER)
    await page.press("two")
    assert await page.run("return document.getElementById('text').value") == "one\ntwo"
    await page.press(Keys.ENTER)
    await page.until("document.querySelectorAll('.answer span').length > 2")
    assert await page.run("return document.getElementById('turns').ariaBusy") == "true"
    await page.press(Keys.ESCAPE)
    assert "ended early" in f"{await page.answered()} {await page.text('.answer .after')}"
    assert await page.run("return document.getElementById('turns').ariaBusy") == "false"
    reached = []
    for _ in range(12):
        await page.press(Keys.TAB)
        reached.append(await page.run("const a = document.activeElement; return a.id || a.className || a.localName"))
    assert {"send", "summary", "clear", "coloured", "again"} <= set(reached)


async def test_everything_that_can_be_used_has_a_name(page: Page, url: str) -> None:
    await page.open(url)
    await page.run("document.getElementById('settings').open = true")
    nameless = await page.run(
        "return [...document.querySelectorAll('button, input, textarea, [role=img], [role=log], aside')].filter("
        "one => !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map(one => one.outerHTML)"
    )
    assert nameless == []
    assert await page.run("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
async def test_it_fits_every_width(page: Page, url: str, width: int) -> None:
    await page.open(url, width=width)
    await page.set("max_tokens", 120)
    await page.ask("a-word-without-an-end" * 12)
    await page.answered()
    assert await page.run("return document.documentElement.scrollWidth") <= width
    inside = await page.run(
        "return ['send', 'text', 'clear', 'acceptance-now', 'rtt-now'].every(id => { const box = document"
        ".getElementById(id).getBoundingClientRect(); return box.width && box.left >= 0 && box.right <= innerWidth "
        "&& box.top >= 0 && box.bottom <= innerHeight; })"
    )
    assert inside


CONTRAST = """
const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(c => c / 255)
  .map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
const ground = one => { for (; one; one = one.parentElement) { const found = getComputedStyle(one).backgroundColor;
  if (!/, 0\\)$/.test(found)) return found; } return "rgb(255, 255, 255)"; };
return Object.fromEntries(["body", "#model", "#send", ".draft", ".target", ".alone", ".who", ".after", ".again", "dt",
  ".problem"].map(name => [name, document.querySelector(name)]).filter(([, one]) => one).map(([name, one]) => {
  const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
  return [name, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; }));
"""
READABLE = 4.5
"""Least contrast of text, by the Web Content Accessibility Guidelines."""


@pytest.mark.parametrize("dark", [False, True])
async def test_texts_can_be_read_by_day_and_by_night(page: Page, url: str, dark: bool) -> None:
    await page.open(url, dark=dark)
    await page.set("max_tokens", 20)
    await page.ask("x")
    await page.answered()
    contrast = await page.run(CONTRAST)
    assert {"body", "#send", ".draft", ".target", ".alone", ".again", "dt"} <= set(contrast)
    assert {name: value for name, value in contrast.items() if value < READABLE} == {}
    night = await page.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert night == dark
