"""Test the OpenAI-compatible server over a real socket, in front of a scripted target."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from fake_verifier import FakeVerifier, until_free, until_live
from openai import (
    APIError,
    APIStatusError,
    AsyncOpenAI,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from openai.types import CompletionChoice
from openai.types.chat.chat_completion import Choice
from reciter import TEXT

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.options import ServeOptions
from edge_agent.http.responses import REASONS
from edge_agent.http.serve import serving
from edge_agent.sdk.types import FinishReason
from outrider.core.errors import Killed, OutriderError, Overloaded, ProtocolViolation, VocabularyMismatch

LOCAL = "127.0.0.1:0"


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def web(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as made:
        yield made


def problem(answer: httpx.Response) -> dict[str, Any]:
    """Return the error, after checking that no key is missing."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


# --- what it answers


async def test_a_completion_is_the_targets_text_with_usage_and_figures(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model="fake", prompt="x", max_tokens=30, temperature=0)
    choice = answer.choices[0]
    assert choice.text == TEXT[: len(choice.text)] and choice.finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30
    extra = choice.outrider  # type: ignore[attr-defined]
    assert extra["statistics"]["tokens"] == 30 and extra["verified"] is True and extra["session_id"]
    assert (extra["acceptance_rule"], extra["lossy"]) == ("coupled", False)


async def test_an_answer_by_typical_acceptance_says_that_it_is_lossy(web: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 9, "acceptance_rule": "typical", "typical_epsilon": 0.2}
    answer = (await web.post("/v1/completions", json=body)).json()
    extra = answer["choices"][0]["outrider"]
    assert (extra["acceptance_rule"], extra["lossy"]) == ("typical", True)
    refused = await web.post("/v1/completions", json={**body, "typical_epsilon": 2})
    assert refused.status_code == 400
    assert problem(refused)["param"] == "typical_epsilon"


async def test_chat_streams_in_openais_order(openai: AsyncOpenAI) -> None:
    chunks = [
        chunk
        async for chunk in await openai.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=25,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT[: len(text)] != ""
    *rest, ending, usage = chunks
    assert ending.choices[0].finish_reason == "length" and ending.choices[0].outrider["statistics"]["tokens"] == 25  # type: ignore
    assert usage.choices == [] and usage.usage and usage.usage.completion_tokens == 25
    assert all(chunk.usage is None for chunk in (*rest, ending)) and len({chunk.id for chunk in chunks}) == 1


async def test_continuous_usage_counts_up_with_the_chunks_and_without_usage_there_is_none(
    web: httpx.AsyncClient,
) -> None:
    async def usages(**options: bool) -> list[Any]:
        body = {"prompt": "x", "max_tokens": 20, "n": 2, "stream": True, "stream_options": options}
        lines = (await web.post("v1/completions", json=body)).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert all("metrics" not in event for event in events)  # of several choices
        return [([choice["index"] for choice in event["choices"]], event.get("usage")) for event in events]

    *chunks, (none, total) = await usages(include_usage=True, continuous_usage_stats=True)
    for index in (0, 1):
        counts = [usage["completion_tokens"] for choices, usage in chunks if choices == [index]]
        assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == 20
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for _, usage in chunks)
    assert none == [] and total["completion_tokens"] == 40
    assert {usage for _, usage in await usages(continuous_usage_stats=True)} == {None}
    *plain, (_, last) = await usages(include_usage=True)
    assert {usage for _, usage in plain} == {None} and last["completion_tokens"] == 40


async def test_a_stop_string_ends_a_stream_and_frees_the_verifier(openai: AsyncOpenAI, verifier: FakeVerifier) -> None:
    stream = await openai.completions.create(
        model="fake", prompt="x", max_tokens=900, stop=["🙂"], stream=True, temperature=0
    )
    pieces = [chunk.choices[0] async for chunk in stream]
    assert "".join(piece.text for piece in pieces) == TEXT[: TEXT.index("🙂")]
    assert pieces[-1].finish_reason == "stop"
    await until_free(verifier)


async def test_prompts_may_be_many_and_token_ids_and_be_echoed(openai: AsyncOpenAI, verifier: FakeVerifier) -> None:
    answer = await openai.completions.create(model="fake", prompt=["ab", "c"], max_tokens=3, n=2, echo=True, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices[:2]] == ["ab", "ab"]
    assert answer.usage and answer.usage.completion_tokens == 12
    prompts = [opening.attach.prompt for opening in verifier.opens]
    assert answer.usage.prompt_tokens == sum(map(len, set(prompts)))
    seeds = {opening.attach.sampling.seed for opening in verifier.opens}
    assert seeds == {5, 6, 7, 8}  # each choice has noise of its own
    ids = list(prompts[0])
    answer = await openai.completions.create(model="fake", prompt=ids, max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith("ab") or answer.choices[0].text.startswith("c")
    assert verifier.opens[-1].attach.prompt == tuple(ids)


async def test_choices_grow_side_by_side_in_a_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.completions.create(model="fake", prompt="x", max_tokens=12, n=3, stream=True, echo=True)
    texts = {0: "", 1: "", 2: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {f"x{TEXT}"[: len(texts[0])]}


async def test_parameters_reach_the_target_and_openais_defaults_hold(
    openai: AsyncOpenAI, verifier: FakeVerifier
) -> None:
    await openai.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}],
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=-1,
        extra_body={"top_k": 7, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [3], "unheard_of": {"a": 1}},
        user="somebody",
        max_tokens=4,
    )
    attach = verifier.opens[-1].attach
    sampling = attach.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.5, -0.5, 2**64 - 1)
    assert attach.ignore_eos and attach.stop_token_ids == (3,) and attach.max_tokens == 4


async def test_an_answer_of_no_stated_length_is_as_long_as_the_target_can_hold(
    openai: AsyncOpenAI, verifier: FakeVerifier, client: AsyncClient
) -> None:
    verifier.script.step_s = 0.0005
    bundle = await client.prepare()
    client._bundle = replace(bundle, description=replace(bundle.description, max_sequence=60))
    answer = await openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "b"}], temperature=0
    )
    assert answer.usage and answer.usage.total_tokens == 60


async def test_provenance_is_reported_per_token_where_it_is_asked_for(openai: AsyncOpenAI) -> None:
    stream = await openai.completions.create(
        model="fake", prompt="x", max_tokens=150, stream=True, temperature=0, extra_body={"provenance": True}
    )
    tokens: list[dict[str, Any]] = []
    async for chunk in stream:
        extra = getattr(chunk.choices[0], "outrider", None)
        tokens += (extra or {}).get("tokens", [])
        ending = chunk
    assert bytes(b for token in tokens for b in token["bytes"]).decode(errors="ignore").startswith(TEXT)
    own = sum(token["provenance"] == "draft" for token in tokens)
    assert own == ending.choices[0].outrider["statistics"]["accepted"] > 0  # type: ignore[attr-defined]


def test_every_ending_has_a_name_that_openais_clients_know() -> None:
    assert set(REASONS) == set(get_args(FinishReason))
    for choice in (CompletionChoice, Choice):
        assert set(REASONS.values()) <= set(get_args(choice.model_fields["finish_reason"].annotation))


async def test_nobody_between_is_to_keep_or_gather_a_streams_events(web: httpx.AsyncClient) -> None:
    answer = await web.post("v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True})
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


# --- models and state


async def test_the_target_is_the_one_model(openai: AsyncOpenAI, web: httpx.AsyncClient) -> None:
    assert [model.id async for model in openai.models.list()] == ["fake"]
    assert (await openai.models.retrieve("fake")).owned_by == "outrider"
    with pytest.raises(NotFoundError, match="does not exist here"):
        await openai.models.retrieve("gpt-4")
    with pytest.raises(NotFoundError) as caught:
        await openai.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert (await web.get("health")).json() == {"status": "ok"}


async def test_it_lives_but_is_not_ready_before_the_target_is_known(
    tmp_path: Path, edge_settings: EdgeSettings
) -> None:
    async with (
        AsyncClient(verifier="127.0.0.1:1", cache_dir=tmp_path, settings=edge_settings) as client,
        serving(client, ServeOptions(LOCAL)) as url,
        httpx.AsyncClient(base_url=url) as web,
    ):
        assert (await web.get("health")).status_code == 200
        answer = await web.get("ready")
        assert answer.status_code == 503 and answer.json()["status"] == "unreachable"
        assert answer.json()["reason"].startswith("the verifier at 127.0.0.1:1 (--verifier) cannot be reached")
        answer = await web.post("v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503 and problem(answer)["code"] == "unavailable"


async def test_the_chat_page_asks_nobody_but_this_server(web: httpx.AsyncClient) -> None:
    answer = await web.get("")
    assert answer.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in re.sub(r"(?m)^//.*$", "", answer.text)  # no address of anybody's
    assert "unsafe" not in answer.headers["content-security-policy"]


# --- what it refuses


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"messages": [{"role": "function", "content": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
async def test_what_it_does_not_heed_is_refused_by_name(
    web: httpx.AsyncClient, more: dict[str, Any], param: str
) -> None:
    answer = await web.post("v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **more})
    assert answer.status_code == 400
    error = problem(answer)
    assert (error["param"], error["code"], error["type"]) == (param, "unsupported_parameter", "invalid_request_error")


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tools": None},
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"chat_template_kwargs": {}},
        {"min_tokens": 0},
        {"store": True},
    ],
)
async def test_what_changes_nothing_is_let_pass(web: httpx.AsyncClient, harmless: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **harmless}
    assert (await web.post("v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "n": 65}, "n"),
        ({"prompt": ["x"] * 33, "n": 2}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "stop": ["a"] * 100}, "stop"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": {"1": 500}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"a": 5}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "x", "max_tokens": 16.5}, "max_tokens"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": [1, 2, 10**9]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
    ],
)
async def test_wrong_values_are_refused_with_the_field(
    web: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await web.post("v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert (problem(answer)["param"], problem(answer)["code"]) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogates"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content: "),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "at most"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "30"),
    ],
)
async def test_wrong_values_of_a_chat_are_refused_by_the_chats_own_names(
    web: httpx.AsyncClient, more: dict[str, Any], param: str, said: str
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **more})
    answer = await web.post("v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = problem(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_a_whole_number_may_be_written_with_a_point(web: httpx.AsyncClient, verifier: FakeVerifier) -> None:
    body = {"prompt": "x", "max_tokens": 3.0, "seed": 7.0, "stop_token_ids": [2.0]}
    assert (await web.post("v1/completions", json=body)).status_code == 200
    attach = verifier.opens[-1].attach
    assert (attach.max_tokens, attach.sampling.seed, attach.stop_token_ids) == (3, 7, (2,))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"", b'{"prompt": NaN}'])
async def test_bodies_that_are_no_request_are_refused(web: httpx.AsyncClient, content: bytes) -> None:
    answer = await web.post("v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert problem(answer)["param"] in (None, "prompt")


async def test_json_that_is_not_called_so_is_refused_with_what_to_say(web: httpx.AsyncClient) -> None:
    content = b'{"prompt": "x"}'
    answer = await web.post(
        "v1/completions", content=content, headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 400
    assert "`content-type: application/json`" in problem(answer)["message"]


async def test_a_request_that_takes_too_long_gets_the_servers_own_bound(
    verifier: FakeVerifier, tmp_path: Path, edge_settings: EdgeSettings
) -> None:
    async with (
        AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=edge_settings, timeout=0.4) as client,
        serving(client, ServeOptions(LOCAL)) as url,
        httpx.AsyncClient(base_url=url) as web,
    ):
        await client.prepare()
        answer = await web.post("v1/completions", json={"prompt": "x", "max_tokens": 4_000})
        assert (answer.status_code, problem(answer)["code"]) == (504, "timeout")
        assert "0.4 s" in problem(answer)["message"] and "--timeout" in problem(answer)["message"]


async def test_a_body_that_is_no_json_is_said_to_be_none(web: httpx.AsyncClient) -> None:
    answer = await web.post("v1/completions", content=b'{"prompt": x}', headers={"content-type": "application/json"})
    error = problem(answer)
    assert (error["param"], error["message"]) == (None, "the body is no JSON: Expecting value at character 11")


async def test_other_paths_and_methods_have_errors_of_the_same_shape(web: httpx.AsyncClient) -> None:
    nothing = problem(await web.post("v1/embeddings"))
    assert nothing["code"] == "not_found" and "POST /v1/embeddings is not served here" in nothing["message"]
    assert problem(await web.get("v1/completions"))["code"] == "method_not_allowed"


async def test_a_prompt_that_is_too_long_says_so_as_openai_does(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        await openai.completions.create(model="fake", prompt="x" * 9000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_a_cluster_without_room_is_429_and_says_when_to_come_back(
    web: httpx.AsyncClient, openai: AsyncOpenAI, verifier: FakeVerifier
) -> None:
    verifier.script.refuse = Overloaded("no room", retry_after_s=0.9)
    for stream in (False, True):
        answer = await web.post("v1/completions", json={"prompt": "x", "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert problem(answer)["code"] == "overloaded"
    with pytest.raises(RateLimitError):
        await openai.completions.create(model="fake", prompt="x")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (VocabularyMismatch("another token table"), 500, "vocabulary_mismatch"),
        (ProtocolViolation("base goes back"), 502, "protocol_violation"),
    ],
)
async def test_what_is_wrong_between_device_and_cluster_is_not_the_clients_fault(
    web: httpx.AsyncClient, verifier: FakeVerifier, error: OutriderError, status: int, code: str
) -> None:
    verifier.script.refuse = error
    answer = await web.post("v1/completions", json={"prompt": "x"})
    assert (answer.status_code, problem(answer)["code"]) == (status, code)


async def test_a_session_that_an_operator_has_killed_does_not_begin_again(url: str, verifier: FakeVerifier) -> None:
    verifier.script.step_s = 0.01
    async with AsyncOpenAI(base_url=f"{url}v1", api_key="none") as retrying:
        asking = asyncio.create_task(retrying.completions.create(model="fake", prompt="x", max_tokens=4000))
        await until_live(verifier)
        verifier.drop_streams(Killed("an operator has ended the session"))
        with pytest.raises(APIStatusError) as caught:
            await asking
    assert (caught.value.status_code, caught.value.code) == (410, "session_killed")
    assert len(verifier.opens) == 1


async def test_a_stream_whose_session_is_killed_ends_with_an_event_that_says_so(
    openai: AsyncOpenAI, verifier: FakeVerifier
) -> None:
    verifier.script.step_s = 0.01
    stream = await openai.completions.create(model="fake", prompt="x", max_tokens=4000, stream=True)
    with pytest.raises(APIError) as caught:
        async for _ in stream:
            verifier.drop_streams(Killed("an operator has ended the session"))
    assert caught.value.code == "session_killed"
    assert len(verifier.opens) == 1


async def test_an_error_in_mid_stream_is_sent_as_an_event(openai: AsyncOpenAI, verifier: FakeVerifier) -> None:
    verifier.script.step_s = 0.02
    stream = await openai.completions.create(model="fake", prompt="x", max_tokens=2000, stream=True)
    with pytest.raises(Exception, match=r"the verifier at 127\.0\.0\.1:\d+ .*cannot be reached: ") as caught:
        async for chunk in stream:
            if chunk.choices[0].text:
                await verifier.kill()
    assert type(caught.value).__module__.startswith("openai")


async def test_text_that_the_draft_writes_alone_says_so_in_every_chunk(
    client: AsyncClient, openai: AsyncOpenAI, verifier: FakeVerifier
) -> None:
    await verifier.kill()
    client._defaults["offline"] = "draft_only"
    stream = await openai.completions.create(model="fake", prompt="x", max_tokens=5, stream=True, temperature=0)
    async for chunk in stream:
        assert chunk.choices[0].outrider["verified"] is False  # type: ignore[attr-defined]
    client._defaults["offline"] = "raise"
    with pytest.raises(InternalServerError) as caught:
        await openai.completions.create(model="fake", prompt="x", max_tokens=5)
    assert caught.value.status_code == 503


# --- who goes away


async def test_a_client_that_goes_away_cancels_its_request(web: httpx.AsyncClient, verifier: FakeVerifier) -> None:
    verifier.script.step_s = 0.01
    for stream in (True, False):
        body = {"prompt": "x", "max_tokens": 4000, "stream": stream, "n": 2}
        if stream:
            async with web.stream("POST", "v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
        else:
            with pytest.raises(httpx.ReadTimeout):
                await web.post("v1/completions", json=body, timeout=0.3)
        await until_free(verifier)
