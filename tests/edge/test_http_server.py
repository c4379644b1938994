"""Test the OpenAI-compatible server over a real socket, in front of a scripted target."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_verifier import FakeVerifier, until_free, until_live
from openai import (
    APIStatusError,
    AsyncOpenAI,
    InternalServerError,
    RateLimitError,
)
from reciter import TEXT

from edge_agent import AsyncClient
from outrider.core.errors import Killed, Overloaded
from outrider.core.protocol.messages import sampling_of

LOCAL = "127.0.0.1:0"


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def web(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as made:
        yield made


def problem(answer: httpx.Response) -> dict[str, Any]:
    """Return the error, after checking that no key is missing."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


# --- what it answers


async def test_prompts_may_be_many_and_token_ids_and_be_echoed(openai: AsyncOpenAI, verifier: FakeVerifier) -> None:
    answer = await openai.completions.create(model="fake", prompt=["ab", "c"], max_tokens=3, n=2, echo=True, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices[:2]] == ["ab", "ab"]
    assert answer.usage and answer.usage.completion_tokens == 12
    prompts = [tuple(opening.attach.prompt) for opening in verifier.opens]
    assert answer.usage.prompt_tokens == sum(map(len, set(prompts)))
    seeds = {opening.attach.sampling.seed for opening in verifier.opens}
    assert seeds == {5, 6, 7, 8}  # each choice has noise of its own
    ids = list(prompts[0])
    answer = await openai.completions.create(model="fake", prompt=ids, max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith("ab") or answer.choices[0].text.startswith("c")
    assert verifier.opens[-1].attach.prompt == ids


async def test_parameters_reach_the_target_and_openais_defaults_hold(
    openai: AsyncOpenAI, verifier: FakeVerifier
) -> None:
    await openai.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}],
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=-2,
        extra_body={"top_k": 7, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [3], "speculation": False, "x": 1},
        logit_bias={"7": -100, "9": 1.5},
        user="somebody",
        max_tokens=4,
    )
    attach = verifier.opens[-1].attach
    sampling = sampling_of(attach.sampling)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.5, -0.5, 2**64 - 2)
    assert sampling.logit_bias == ((7, -100.0), (9, 1.5))
    assert attach.undrafted and attach.ignore_eos and attach.stop_token_ids == [3] and attach.max_tokens == 4


async def test_fields_are_read_as_other_servers_read_them(web: httpx.AsyncClient, verifier: FakeVerifier) -> None:
    user = {"messages": [{"role": "user", "content": "b"}], "stop": TEXT[:3]}

    async def attach_of(**fields: Any) -> Any:
        answer = await web.post("v1/chat/completions", json={**user, **fields})
        assert answer.status_code == 200, answer.text
        return verifier.opens[-1].attach

    seeds = {(await attach_of(seed=-1)).sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    for fields in ({"temperature": 1e-7}, {"top_p": 0}, {"top_p": 0, "temperature": 0.7}):
        assert sampling_of((await attach_of(**fields)).sampling).greedy
    assert (await attach_of(repeat_penalty=1.3)).sampling.repetition_penalty == 1.3
    left = (await attach_of()).max_tokens
    prompt = len(verifier.opens[-1].attach.prompt)
    assert left == 4096  # for a beginning
    assert (await attach_of(max_tokens=-1)).max_tokens == left
    for many in (60_000, 200_000, 10**9):
        assert (await attach_of(max_completion_tokens=many)).max_tokens == 8192 - prompt
    longest = await attach_of(max_tokens=200_000, min_tokens=150_000)
    assert longest.min_tokens == longest.max_tokens == 8192 - prompt
    biased = await attach_of(logit_bias={"7": -1000, "9": 101}, top_k=-1)
    assert sampling_of(biased.sampling).logit_bias == ((7, -100.0), (9, 100.0))
    assert sampling_of(biased.sampling).top_k == 0


async def test_unknown_fields_are_named_in_the_answer(web: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "temprature": 0, "a\r\nb": 1, "unset": None}
    for stream in (False, True):
        answer = await web.post("v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 200 and answer.headers["x-outrider-ignored"] == "temprature, ..."
    assert "x-outrider-ignored" not in (await web.post("v1/completions", json={"prompt": "x", "max_tokens": 1})).headers


# --- models and state


# --- what it refuses


async def test_what_it_does_not_heed_is_refused_by_name_and_what_changes_nothing_let_pass(
    web: httpx.AsyncClient,
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for more, param in (
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ):
        answer = await web.post("v1/chat/completions", json={**chat, **more})
        error = problem(answer)
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    harmless = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "none", "store": True, "n": None}
    assert (await web.post("v1/chat/completions", json={**chat, **harmless})).status_code == 200


async def test_wrong_values_are_refused_with_the_field(web: httpx.AsyncClient) -> None:
    user = {"role": "user", "content": "x"}
    for path, body, param in (
        *(
            ("completions", {"prompt": "x", **more}, next(iter(more)))
            for more in (
                {"max_tokens": 0},
                {"max_tokens": 16.5},
                {"temperature": "hot"},
                {"temperature": -1},
                {"n": 65},
                {"stop": [""]},
                {"stop_token_ids": [-1]},
                {"top_k": -2},
                {"min_tokens": 17},
                {"logit_bias": {"a": 5}},
                {"stream_options": {"include_usage": True}},
                *({"prompt": prompt} for prompt in ([], "", [[]], [1, 2, 10**9], [1, "x"], "\ud800", None)),
            )
        ),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ("chat/completions", {"messages": [user], "logprobs": True, "top_logprobs": 30}, "top_logprobs"),
    ):
        headers = {"content-type": "application/json"}
        answer = await web.post(f"v1/{path}", content=json.dumps(body), headers=headers)
        assert (answer.status_code, problem(answer)["param"]) == (400, param), (body, answer.text)


async def test_what_is_no_request_gets_an_error_of_the_same_shape(web: httpx.AsyncClient) -> None:
    for content in (b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"", b'{"prompt": NaN}'):
        answer = await web.post("v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and problem(answer)["param"] in (None, "prompt")
    answer = await web.post("v1/completions", content=b'{"prompt": "x"}')
    assert answer.status_code == 400 and "`content-type: application/json`" in problem(answer)["message"]
    assert problem(await web.post("v1/embeddings"))["code"] == "not_found"
    assert "the base URL ends with /v1" in problem(await web.post("chat/completions"))["message"]
    assert problem(await web.get("v1/completions"))["code"] == "method_not_allowed"
    too_long = await web.post("v1/completions", json={"prompt": "x" * 9000})
    assert problem(too_long)["code"] == "context_length_exceeded"


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
                await web.post("v1/completions", json=body, timeout=httpx.Timeout(60, read=0.3))
        await until_free(verifier)
