"""Test the SDK end to end on the device's side: a real draft on llama.cpp, a scripted target behind a real socket."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, Script
from reciter import TEXT, recital
from scripted import tokenizer_json

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.cli import main
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import BadRequest, ModelRefused
from outrider.telemetry.logs import JsonFormatter


@pytest.fixture
def edge_settings() -> EdgeSettings:
    return EdgeSettings()


@pytest.fixture(scope="module")
def tokenizer(tiny_gguf: Path) -> TargetTokenizer:
    return TargetTokenizer(tokenizer_json())


@pytest.fixture
def script(tiny_gguf: Path) -> Script:
    return recital(tiny_gguf)


@pytest.fixture
async def verifier(script: Script) -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(script) as running:
        yield running


async def test_text_comes_out_whole_and_equal_to_plain_streaming(
    client: AsyncClient, verifier: FakeVerifier, tmp_path: Path, tokenizer: TargetTokenizer
) -> None:
    length = len(tokenizer.encode_plain(TEXT))
    completion = await client.generate("# Python", max_tokens=2 * length)
    assert completion.text == TEXT * 2
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 2 * length and completion.usage.prompt_tokens > 0
    assert completion.statistics.accepted > 0  # by n-grams at least: the second round repeats the first
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=None) as plain:
        assert (await plain.generate("# Python", max_tokens=2 * length)).token_ids == completion.token_ids


async def until_nothing_is_live(verifier: FakeVerifier) -> None:
    for _ in range(300):
        if not verifier.live:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the session was not cancelled")


async def test_the_id_of_a_session_without_a_coordinator_has_128_random_bits_and_is_in_no_line_of_the_log(
    client: AsyncClient, verifier: FakeVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter("edge"))
    logging.getLogger().addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG):
            await client.generate("hello", max_tokens=8)
            async with await client.stream("hello", max_tokens=200) as stream:
                await anext(aiter(stream))
                verifier.drop_streams()
                await stream.drain()
    finally:
        logging.getLogger().removeHandler(handler)
    ids = {opening.session_id for opening in verifier.opens}
    assert len(ids) == 2 and all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert all(one[:8] in written.getvalue() and one not in written.getvalue() for one in ids)


async def test_leaving_the_iteration_alone_cancels_it_too(client: AsyncClient, verifier: FakeVerifier) -> None:
    stream = await client.stream("x", max_tokens=3000)
    async for _ in stream:
        break
    await until_nothing_is_live(verifier)
    assert stream.completion.finish_reason == "cancelled"
    assert b'outrider_edge_requests_total{finish="cancelled"} 1.0' in client.metrics.render()
    assert [chunk async for chunk in stream] == []


async def test_closing_the_client_cancels_what_runs(client: AsyncClient, verifier: FakeVerifier) -> None:
    stream = await client.stream("x", max_tokens=3000)
    chunks = aiter(stream)
    await anext(chunks)
    verifier.freeze()  # a task waits for a chunk that does not come
    reading = asyncio.create_task(stream.drain())
    await asyncio.sleep(0.05)
    begun = asyncio.get_running_loop().time()
    await client.close()
    assert asyncio.get_running_loop().time() - begun < 1.5
    await until_nothing_is_live(verifier)
    assert (await reading).finish_reason == "cancelled"
    with pytest.raises(BadRequest, match="closed"):
        await client.generate("x")


async def test_chat_uses_the_targets_template(client: AsyncClient, verifier: FakeVerifier) -> None:
    completion = await client.chat([{"role": "user", "content": "hello <|end|>"}], max_tokens=20)
    assert completion.text == TEXT[: len(completion.text)] != ""
    prompt = verifier.opens[-1].attach.prompt
    table = TargetTokenizer(tokenizer_json())
    ends = [i for i in prompt if i in table.special]
    assert len(ends) == 2  # the template's own two: what the user wrote is text


@pytest.mark.parametrize(
    ("template", "error", "why"),
    [
        (b"{% for %}", ModelRefused, "does not compile: line 1: Expected an expression"),
        (b"\n{{ raise_exception('no users') }}", BadRequest, "refuses these messages at line 2: no users"),
    ],
)
async def test_a_template_that_cannot_be_used_is_told_of_at_the_load_and_disables_chat_alone(
    client: AsyncClient,
    verifier: FakeVerifier,
    caplog: pytest.LogCaptureFixture,
    template: bytes,
    error: type[Exception],
    why: str,
) -> None:
    verifier.script.artifacts["template"] = template
    await client.prepare()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("chats with fake may fail, completions work: the target's chat template ") and why in said
    assert said.endswith(" (chat_template.jinja, or tokenizer_config.json, of its folder)")
    assert (await client.generate("x", max_tokens=3)).text
    with pytest.raises(error, match=why):
        await client.chat([{"role": "user", "content": "x"}])


async def test_sampling_parameters_reach_the_verifier_and_seeds_are_random(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.generate([1, 2], max_tokens=3, temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=11)
    sampling = verifier.opens[-1].attach.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.seed) == (0.7, 0.9, 1.1, 11)
    seeds = {(await client.generate([1, 2], max_tokens=1)).seed for _ in range(4)}
    assert len(seeds) == 4


async def test_artifacts_are_fetched_once_and_a_broken_download_is_resumed(
    verifier: FakeVerifier, tmp_path: Path
) -> None:
    verifier.script.break_after = 2
    verifier.script.chunk_bytes = 1000
    for _ in range(2):
        async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path) as made:
            await made.generate("x", max_tokens=2)
    offsets = [offset for _, offset in verifier.fetches]
    assert len(offsets) == 4 and sorted(offsets)[:3] == [0, 0, 0] and max(offsets) == 2000


@pytest.mark.parametrize(("prompt", "max_tokens"), [("abc " * 120, 80)])
async def test_a_text_that_outgrows_the_drafts_context_goes_on_by_n_grams_and_is_counted(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: str, max_tokens: int
) -> None:
    caplog.set_level("INFO", "edge_agent.drafting")
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path) as made:
        plain = await made.generate(prompt, max_tokens=max_tokens)
        completion = await made.generate(prompt, max_tokens=max_tokens)
        metrics = made.metrics.render().decode()
    assert completion.token_ids == plain.token_ids and len(completion.token_ids) == max_tokens
    assert "ContextFull" in completion.statistics.draft_failure and completion.statistics.draft == "ngram"
    assert "outrider_edge_draft_failures_total 2.0" in metrics
    assert [record.levelname for record in caplog.records if "gave up" in record.message] == ["INFO", "INFO"]
    assert any(
        "sessions of over 512 tokens go on by n-grams alone: it was trained for no more" in m for m in caplog.messages
    )


@pytest.mark.parametrize("ngram", [True])
async def test_more_sessions_than_workers_draft_by_n_grams_alone_and_it_is_said(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture, ngram: bool
) -> None:
    caplog.set_level("INFO", "edge_agent.drafting")
    settings = EdgeSettings(draft_workers=1, ngram=ngram)
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=settings) as made:
        completions = await asyncio.gather(*(made.generate("x", max_tokens=60) for _ in range(4)))
        metrics = made.metrics.render().decode()
    assert len({completion.token_ids for completion in completions}) == 1
    first, *others = sorted((one.statistics for one in completions), key=lambda one: one.draft_busy)
    assert first.draft not in ("", "ngram") and not first.draft_busy
    assert [one.draft for one in others] == 3 * ["ngram" if ngram else ""]
    assert [one.release for one in others] == 3 * ["ngram" if ngram else ""]
    assert all(one.draft_busy and not one.draft_failure for one in others)
    assert "all draft workers were in use" in others[0].summary()
    assert "outrider_edge_draft_busy_total 3.0" in metrics and "outrider_edge_draft_failures_total 0.0" in metrics
    what = "by n-grams alone" if ngram else "nothing"
    said = [
        line for line in caplog.messages if line.startswith(f"a session drafts {what}: all draft workers are in use")
    ]
    assert len(said) == 3 and "draft_workers is 1" in said[0]


def test_a_client_needs_exactly_one_address() -> None:
    for given in ({}, {"coordinator": "a:1", "verifier": "b:2"}):
        with pytest.raises(BadRequest, match="either"):
            AsyncClient(**given, settings=EdgeSettings(coordinator="", verifier=""))  # type: ignore[arg-type]


def test_the_command_line_prints_text_and_statistics(
    script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def served() -> None:
        async with FakeVerifier(script) as verifier:
            where = ["--verifier", verifier.address, "--cache-dir", str(tmp_path)]
            await asyncio.to_thread(main, ["generate", "x", "--max-tokens", "30", "--stats", *where])
            await asyncio.to_thread(main, ["chat", "--message", "hi", "--max-tokens", "10", *where])

    asyncio.run(served())
    out, err = capfd.readouterr()
    assert out.startswith(TEXT[:20])
    assert "tokens/s" in err


def test_a_device_imports_neither_torch_nor_the_other_applications() -> None:
    code = (
        "import sys, edge_agent.cli, edge_agent.drafting.sources.llama, outrider.llama\n"
        "bad = {'torch', 'transformers', 'redis', 'cloud_verifier', 'coordinator'} & set(sys.modules)\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
