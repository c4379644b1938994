"""Test the SDK end to end on the device's side: a real draft on llama.cpp, a scripted target behind a real socket."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, until_free

from edge_agent import AsyncClient, EdgeSettings
from outrider.core.errors import BadRequest, ModelRefused
from outrider.telemetry.logs import JsonFormatter


@pytest.fixture
def edge_settings() -> EdgeSettings:
    return EdgeSettings()


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
    await until_free(verifier)
    assert stream.completion.finish_reason == "cancelled"
    assert b'outrider_edge_requests_total{finish="cancelled"} 1.0' in client.metrics.render()
    assert [chunk async for chunk in stream] == []


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


async def test_a_text_that_outgrows_the_drafts_context_goes_on_by_n_grams_and_is_counted(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edge_agent.drafting")
    prompt, max_tokens = "abc " * 120, 80
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


async def test_more_sessions_than_workers_draft_by_n_grams_alone_and_it_is_said(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edge_agent.drafting")
    settings = EdgeSettings(draft_workers=1)
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=settings) as made:
        completions = await asyncio.gather(*(made.generate("x", max_tokens=60) for _ in range(4)))
        assert b"outrider_edge_draft_busy_total 3.0" in made.metrics.render()
    assert len({completion.token_ids for completion in completions}) == 1
    first, *others = sorted((one.statistics for one in completions), key=lambda one: one.draft_busy)
    assert first.draft not in ("", "ngram") and not first.draft_busy
    assert all(one.draft == "ngram" and one.draft_busy and not one.draft_failure for one in others)
    assert sum(line.startswith("a session drafts by n-grams alone") for line in caplog.messages) == 3


async def test_loading_that_fails_after_its_only_caller_has_gone_is_no_error_of_asyncios(
    verifier: FakeVerifier, tmp_path: Path, give_up_after: Callable[[float], None]
) -> None:
    give_up_after(0.0)
    await verifier.kill()
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path) as made:
        preparing = asyncio.create_task(made.prepare())
        await asyncio.sleep(0)
        assert made._loading is not None
        preparing.cancel()
        await asyncio.wait([made._loading])
        assert preparing.cancelled() and not made._loading.cancelled()
        made._loading = None
    del preparing  # its traceback holds what it awaited
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize(("given", "drafted"), [("auto", ""), ("ngram", "ngram")])
async def test_the_settings_name_the_draft_where_the_caller_does_not(
    verifier: FakeVerifier, tmp_path: Path, given: str, drafted: str
) -> None:
    settings = EdgeSettings(draft="none")
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=given, settings=settings) as made:
        assert (await made.generate("x", max_tokens=8)).statistics.draft == drafted


def test_a_client_needs_exactly_one_address() -> None:
    for given in ({}, {"coordinator": "a:1", "verifier": "b:2"}):
        with pytest.raises(BadRequest, match="either"):
            AsyncClient(**given, settings=EdgeSettings(coordinator="", verifier=""))  # type: ignore[arg-type]
