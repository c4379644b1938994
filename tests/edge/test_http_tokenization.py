"""Test that /tokenize and /detokenize say what transformers says of the demo target."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_verifier import FakeVerifier, Script
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.options import ServeOptions
from edge_agent.http.serve import serving

TARGET = Path(__file__).resolve().parents[2] / "models" / "target"
TEXTS = ["", "How many hens?", " grüße 🙂\n\tdef f(): return 1_000", "a <|end|> b<|user|>", "\x00é" * 50]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many hens? <|end|>"}]


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    artifacts = {
        "template": (TARGET / "chat_template.jinja").read_bytes(),
        "special_tokens": json.dumps(special).encode(),
    }
    data = (TARGET / "tokenizer.json").read_bytes()
    size = json.loads((TARGET / "config.json").read_text())["vocab_size"]
    script = Script(lambda _: 9, vocabulary_size=size, tokenizer_json=data, artifacts=artifacts, eos_token_ids=(0,))
    async with (
        FakeVerifier(script) as verifier,
        AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=None, settings=EdgeSettings()) as client,
        serving(client, ServeOptions("127.0.0.1:0", api_key="secret")) as url,
        httpx.AsyncClient(base_url=url, timeout=20, headers={"authorization": "Bearer secret"}) as made,
    ):
        await client.prepare()
        yield made


async def asked(web: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await web.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("text", TEXTS, ids=["none", "words", "bytes", "control", "long"])
@pytest.mark.parametrize("added", [True, False])
async def test_a_texts_tokens_are_those_of_transformers(
    web: httpx.AsyncClient, reference: PreTrainedTokenizerBase, text: str, added: bool
) -> None:
    body = await asked(web, "tokenize", prompt=text, add_special_tokens=added, return_token_strs=True)
    ids = reference.encode(text, add_special_tokens=added)
    names = reference.convert_ids_to_tokens(ids)
    assert body == {"count": len(ids), "max_model_len": 8192, "tokens": ids, "token_strs": names}
    assert (await asked(web, "detokenize", tokens=ids))["prompt"] == reference.decode(ids) == text


async def test_a_chats_tokens_are_those_that_its_completion_would_read(
    web: httpx.AsyncClient, reference: PreTrainedTokenizerBase
) -> None:
    plain = [{**message, "content": str(message["content"]).removesuffix(" <|end|>")} for message in CHAT]
    body = await asked(web, "tokenize", model="fake", messages=plain)
    assert body["tokens"] == reference.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert body["token_strs"] is None
    spelt = await asked(web, "tokenize", messages=CHAT)
    usage = (await asked(web, "v1/chat/completions", messages=CHAT, max_tokens=1))["usage"]
    assert spelt["count"] == usage["prompt_tokens"] > body["count"] + 1  # what a caller spells out is no control token
