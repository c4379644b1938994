"""Serve a target that says a given text and then ends, behind the HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_verifier import FakeVerifier
from openai import AsyncOpenAI
from reciter import recital, reciting
from scripted import tokenizer_json

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.serve import serving
from edge_agent.target.tokenizer import TargetTokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say how the weather is <|end|>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXT = f"<think>\nKöln, hm.\n</think>\n\nLet me see. {CALL}\n{CALL}"
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{{ call.function.arguments.city }}"
    "{{ 'as text ' + call.function.arguments }}{% endfor %}{{ m.tool_call_id }}<|end|>{% endfor %}"
    "{{ reasoning_effort }}{{ enable_thinking }}{# </think> #}"
)
Says = Callable[..., AbstractAsyncContextManager[tuple[AsyncOpenAI, FakeVerifier]]]


def prompt_of(verifier: FakeVerifier) -> str:
    """Return the text of the last prompt, with control tokens as they are spelt."""
    table = TargetTokenizer(verifier.script.tokenizer_json).table
    return b"".join(table[token] for token in verifier.opens[-1].attach.prompt).decode()


def saying(cache: Path, settings: EdgeSettings) -> Says:
    """Return what serves a target that says a text, and then ends."""

    @asynccontextmanager
    async def server(
        text: str, template: str = QWEN, answer_format: Any = "auto", special: str = "<|user|>"
    ) -> AsyncIterator[tuple[AsyncOpenAI, FakeVerifier]]:
        data = tokenizer_json().replace(b"<|user|>", special.encode())
        tokens = TargetTokenizer(data).encode(f"{text}<|end|>")
        script = replace(
            recital(), target=reciting(tokens), eos_token_ids=tokens[-1:], tokenizer_json=data,
            artifacts={"template": template.encode()},
        )  # fmt: skip
        async with (
            FakeVerifier(script) as verifier,
            AsyncClient(verifier=verifier.address, cache_dir=cache, settings=settings, draft="none") as client,
            serving(client, EdgeSettings(serve_listen="127.0.0.1:0", serve_answer_format=answer_format)) as url,
            AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as openai,
        ):
            yield openai, verifier

    return server
