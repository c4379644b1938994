"""Answer /tokenize and /detokenize in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from edge_agent.http.errors import invalid_value, json_response, unsupported
from edge_agent.http.requests import ChatCompletionRequest, ChatMessage, JsonInteger
from edge_agent.http.starting import bundle_of
from edge_agent.http.streaming import unless_gone
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.request import check_ids
from edge_agent.target.bundle import TargetBundle
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS

_A = TypeVar("_A")

_AT_ONCE = 2
"""Texts that are tokenised at once: long ones take seconds on a thread, and completions use the same threads."""


class TokenizeRequest(ChatCompletionRequest):
    """The body that POST /tokenize takes: a prompt, or messages with what shapes a chat's prompt."""

    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    """Whether to begin with the target's BOS token, if it has one; for a prompt alone, where it is the default."""
    return_token_strs: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if (self.prompt is None) == (not self.messages):
            raise invalid_value("prompt", "give either prompt or messages, a text or a chat to tokenise")
        if self.messages and self.add_special_tokens:
            raise unsupported("add_special_tokens", " with messages, whose template has all that the target needs")


class DetokenizeRequest(BaseModel, extra="allow", strict=True):
    """The body that POST /detokenize takes."""

    model: str | None = None
    tokens: list[JsonInteger] = Field(max_length=MAX_PROMPT_TOKENS)


def add_tokenizer(app: FastAPI, client: AsyncClient) -> None:
    threads = ThreadPoolExecutor(_AT_ONCE, "outrider-tokenize")

    async def on_thread(request: Request, work: Callable[[], _A]) -> _A:
        async def result() -> _A:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

        return await unless_gone(request, result())

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the target's tokens of a text or of a chat, as vLLM does."""
        body.refuse_unsupported()
        bundle = await bundle_of(client, body.model)
        ids = await on_thread(request, lambda: _ids(bundle, body))
        if len(ids) > MAX_PROMPT_TOKENS:
            field = "messages" if body.messages else "prompt"
            raise invalid_value(field, f"{field} has {len(ids)} tokens, must have at most {MAX_PROMPT_TOKENS}")
        names = [bundle.tokenizer.name(token) for token in ids] if body.return_token_strs else None
        longest = bundle.description.max_sequence
        return json_response({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": names})

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of the target's tokens, control tokens spelt out, as vLLM does."""
        bundle = await bundle_of(client, body.model)
        check_ids("tokens", body.tokens, bundle.description.vocabulary_size)
        return json_response({"prompt": await on_thread(request, lambda: bundle.tokenizer.decode(body.tokens))})


def _ids(bundle: TargetBundle, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return bundle.encode_chat(body.template_messages(), body.template_variables())
    return bundle.encode_text(body.prompt, begun=body.add_special_tokens is not False)
