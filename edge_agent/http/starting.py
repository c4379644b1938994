"""Start the sessions that answer a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from edge_agent.config import EdgeSettings
from edge_agent.http.answer_grammar import chat_grammar, text_grammar
from edge_agent.http.errors import ApiError, invalid_value
from edge_agent.http.parsing.answer import AnswerParser
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest, RequestBody
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Options
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.detokenizer import Detokenizer
from outrider.core.errors import BadRequest

_PROMPT_END = 16
"""Tokens of the prompt's end in which reasoning may begin."""


async def start_texts(
    client: AsyncClient, body: CompletionRequest, settings: EdgeSettings
) -> tuple[list[CompletionStream], TargetBundle, list[str]]:
    """Return a stream for each choice of each prompt, the target, and the text that goes before each choice."""
    body.refuse_unsupported()
    _check_choices(body, len(body.prompts), settings)
    grammar, field = await asyncio.to_thread(text_grammar, body)
    streams = await _streams(client, body, body.prompts, grammar, field)
    bundle = await bundle_of(client, body.model)
    echoes = [_echo(prompt, bundle) if body.echo else "" for prompt in body.prompts]
    return streams, bundle, [echo for echo in echoes for _ in range(body.choices)]


async def start_chat(
    client: AsyncClient, body: ChatCompletionRequest, settings: EdgeSettings
) -> tuple[list[CompletionStream], TargetBundle, list[AnswerParser]]:
    """Return a stream for each choice, the target, and the parsers of what the streams bring."""
    body.refuse_unsupported()
    _check_choices(body, 1, settings)
    # One that nothing is taken of: it checks the messages, and has their ids.
    unused = await client.stream_chat(body.template_messages(), body.template_variables(), **body.options(0))
    bundle = await bundle_of(client, body.model)
    source = bundle.template.source if bundle.template is not None else ""
    form = AnswerFormat.of(source, settings.serve_answer_format)
    ids, table = unused.prompt_token_ids, bundle.tokenizer.table
    end = b"".join(table[token] for token in ids[-_PROMPT_END:] if token < len(table)).decode(errors="replace")
    special = {table[token].decode(errors="replace"): token for token in bundle.tokenizer.special}
    grammar, field = await asyncio.to_thread(chat_grammar, body, form, special, end)
    streams = await _streams(client, body, [ids], grammar, field)
    markers, one_call = form.markers(special, calls=bool(body.usable_tools)), body.parallel_tool_calls is False
    form = replace(form, reasoning=None) if body.reasoning_format == "none" else form
    least = body.min_tokens or 0
    parsers = [
        AnswerParser(form, body.parameters, end, body.stops, min_tokens=least, one_call=one_call) for _ in streams
    ]
    for stream, parser in zip(streams, parsers, strict=True):
        stream.read_as(markers, parser)
    return streams, bundle, parsers


async def _streams(
    client: AsyncClient, body: RequestBody, prompts: Sequence[str | Sequence[int]], grammar: str, field: str
) -> list[CompletionStream]:
    """Return a stream for each choice of each prompt, which is tokenised only once.

    A grammar says where the output ends, so `ignore_eos`, which load generators send with whatever they measure, has no
    effect beside one. field: the one that has asked for the grammar, which an error names.
    """
    streams: list[CompletionStream] = []
    ending: Options = {"grammar": grammar, "ignore_eos": False} if grammar else {}
    try:
        for prompt in prompts:
            for choice in range(body.choices):
                if choice:
                    await asyncio.sleep(0)  # many ids take a while to check, and other sessions go first
                    prompt = streams[-1].prompt_token_ids
                asked: Options = {**body.options(len(streams)), **ending}
                streams.append(await client.stream(prompt, **asked))
    except BadRequest as error:
        if error.field == "grammar":
            raise invalid_value(field, f"{field}: {error}") from error
        if error.field == "bytes of the grammar":
            raise invalid_value(field, f"{field} is too large: {error}") from error
        raise
    return streams


def _check_choices(body: RequestBody, prompts: int, settings: EdgeSettings) -> None:
    """Raise ApiError for a request that would take so many slots that others wait."""
    most = max(1, settings.max_sessions // 2)
    if prompts * body.choices > most:
        raise invalid_value(
            "n" if body.choices > 1 else "prompt",
            f"prompts times n are {prompts} x {body.choices}, must be at most {most}, half of what this server does at "
            "once; ask in several requests, or serve with more --max-sessions",
        )


def _echo(prompt: str | list[int], bundle: TargetBundle) -> str:
    if isinstance(prompt, str):
        return prompt
    detokenizer = Detokenizer(bundle.tokenizer.table, bundle.tokenizer.special)
    return "".join(detokenizer.feed(token) for token in prompt if token >= 0)


async def bundle_of(client: AsyncClient, name: str | None) -> TargetBundle:
    """Return the target. Raises ApiError for the name of another model; no name means this one."""
    bundle = await client.prepare()
    known = bundle.description.target.name
    if name and name != known:
        message = f"the model {name[:200]!r} does not exist here; this server has {known!r}: give that, or no model"
        raise ApiError(404, message, param="model", code="model_not_found")
    return bundle
