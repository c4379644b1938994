"""Test log-probabilities at the SDK and over HTTP: one for each token, through broken streams and stop strings."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fake_verifier import FakeVerifier, logprobs_of
from openai import AsyncOpenAI, BadRequestError
from reciter import TEXT
from scripted import tokenizer_json

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.responses import TextLogprobs
from edge_agent.http.serve import serving
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import Unavailable
from outrider.core.protocol.messages import TokenLogprobs


@pytest.fixture
async def openai(client: AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with (
        serving(client, EdgeSettings(serve_listen="127.0.0.1:0")) as url,
        AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as made,
    ):
        yield made


async def test_broken_streams_neither_lose_nor_double_one(client: AsyncClient, verifier: FakeVerifier) -> None:
    verifier.script.step_s = 0.01
    stream = await client.stream("x", max_tokens=200, logprobs=1)
    at = 0
    async for chunk in stream:
        at += len(chunk.token_ids)
        if at % 20 < len(chunk.token_ids):
            verifier.drop_streams()
    completion = stream.completion
    assert completion.statistics.attaches > 3 and len(completion.token_ids) == 200
    assert completion.logprobs == tuple(logprobs_of(p, token, 1) for p, token in enumerate(completion.token_ids))


async def test_the_draft_alone_has_none_to_tell(client: AsyncClient, verifier: FakeVerifier) -> None:
    await client.prepare()
    await verifier.kill()
    with pytest.raises(Unavailable, match="only the target has log-probabilities"):
        await client.generate("x", max_tokens=5, logprobs=1, offline="draft_only")

    with pytest.raises(Unavailable, match="only the target has log-probabilities"):
        await client.generate("x", max_tokens=5, prompt_logprobs=1, offline="draft_only")


async def test_chat_tells_them_as_openai_does(openai: AsyncOpenAI) -> None:
    asked = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "temperature": 0}
    whole = await openai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    logprobs = whole.choices[0].logprobs.content
    assert len(logprobs) == 30 and all(len(one.top_logprobs) == 2 for one in logprobs)
    assert b"".join(bytes(one.bytes) for one in logprobs).decode(errors="replace") == whole.choices[0].message.content
    assert logprobs[0].logprob == -1.0 and logprobs[0].token == TEXT[0]
    streamed = []
    async for chunk in await openai.chat.completions.create(**asked, logprobs=True, stream=True):  # type: ignore
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [one.logprob for one in streamed] == [one.logprob for one in logprobs] and not streamed[0].top_logprobs
    with pytest.raises(BadRequestError, match="top_logprobs"):
        await openai.chat.completions.create(**asked, top_logprobs=2)  # type: ignore[call-overload]


@pytest.mark.parametrize("given", ["eos", "stop"])
async def test_what_ends_an_answer_is_neither_in_a_chats_log_probabilities_nor_in_its_text(
    openai: AsyncOpenAI, client: AsyncClient, verifier: FakeVerifier, given: str
) -> None:
    tokens = TargetTokenizer(tokenizer_json()).encode_plain(TEXT)
    end, before = next((one, at) for at, one in enumerate(tokens[12:], 12) if one not in tokens[:12])
    verifier.script.eos_token_ids = (end,) if given == "eos" else ()
    stops = [end] if given == "stop" else []
    asked = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "logprobs": True}
    asked["extra_body"] = {"stop_token_ids": stops}
    choice = (await openai.chat.completions.create(**asked)).choices[0]  # type: ignore[call-overload]
    table, streamed = TargetTokenizer(tokenizer_json()).table, b""
    assert choice.finish_reason == "stop"
    assert choice.message.content == b"".join(table[token] for token in tokens[:before]).decode()
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode() == choice.message.content
    async for chunk in await openai.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        if chunk.choices[0].logprobs:
            streamed += b"".join(bytes(one.bytes) for one in chunk.choices[0].logprobs.content)
    assert streamed.decode() == choice.message.content
    completion = await client.generate("x", stop_token_ids=stops)
    assert completion.text == choice.message.content and completion.token_ids == (*tokens[:before], end)


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"ab", b"c", b"d"], [3, 5, 6]),
        ([b"\xe2", b"\x82\xac", b"x"], [3, 3, 4]),  # a character of two tokens
        ([b"\xc9", b" y", b"x"], [3, 4, 6]),  # one that is never finished: U+FFFD
        ([b"\xe0", b"\x80", b"x"], [3, 4, 5]),  # nor can it be: U+FFFD twice
        ([b"a", b"<end>", b"x"], [3, 4, 4]),  # no text
    ],
)
def test_offsets_are_those_of_the_text_that_is_delivered(pieces: list[bytes], offsets: list[int]) -> None:
    silent = {i for i, piece in enumerate(pieces) if piece == b"<end>"}
    writer = TextLogprobs(pieces, silent, 3)
    logprobs = [writer.write([i], [TokenLogprobs(-1.0, ())]) for i in range(len(pieces))]
    assert [one["text_offset"][0] for one in logprobs] == offsets
