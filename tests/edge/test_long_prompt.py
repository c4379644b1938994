"""Test prompts that take long to tokenise: no other request waits, and one too long for any target is not tokenised."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier
from reciter import recital
from scripted import tokenizer_json

from edge_agent import AsyncClient, BadRequest
from edge_agent.sdk.request import check_prompt
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    script = recital()
    script.max_sequence = 1 << 20
    async with FakeVerifier(script) as running:
        yield running


@pytest.fixture
async def client(verifier: FakeVerifier, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=None) as made:
        await made.prepare()
        yield made


async def test_a_text_of_more_characters_than_the_target_holds_is_not_tokenised(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = (await client.prepare()).tokenizer
    most = MAX_PROMPT_TOKENS * max(map(len, tokenizer.table))
    for name in ("_tokenizer", "_plain"):
        monkeypatch.setattr(tokenizer, name, None)
    for asked in (client.stream("x" * (most + 1)), client.stream_chat([{"role": "user", "content": "x" * most}])):
        with pytest.raises(BadRequest, match=f"characters, must be at most {most}") as caught:
            await asked
        assert caught.value.field == "length of prompt"


@pytest.mark.parametrize(("max_sequence", "tokens"), [(10, 10), (0, MAX_PROMPT_TOKENS)])
def test_the_bound_on_a_text_is_what_the_longest_tokens_could_spell(max_sequence: int, tokens: int) -> None:
    tokenizer = TargetTokenizer(tokenizer_json(), max_sequence)
    most = tokens * max(map(len, tokenizer.table))
    with pytest.raises(BadRequest, match=f"{most + 1} characters"):
        tokenizer.encode_plain("x" * (most + 1))
    assert max_sequence == 0 or tokenizer.encode_plain("x" * most)


def test_too_many_token_ids_are_refused_before_a_look_at_each() -> None:
    with pytest.raises(BadRequest, match=f"{MAX_PROMPT_TOKENS + 1} tokens"):
        check_prompt(["no id"] * (MAX_PROMPT_TOKENS + 1))


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.stream("x"), lambda client: client.stream_chat([{"role": "user", "content": "x"}])],
    ids=["text", "chat"],
)
async def test_a_prompt_is_tokenised_beside_the_event_loop(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, ask: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    tokenizer, threads = (await client.prepare()).tokenizer, list[threading.Thread]()

    def encode(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    for name in ("encode", "encode_plain", "encode_prompt"):
        monkeypatch.setattr(tokenizer, name, encode)
    await ask(client)
    assert threads and threading.current_thread() not in threads
