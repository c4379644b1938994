"""Start the sessions that answer a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from edge_agent.http.answer_grammar import chat_grammar, text_grammar
from edge_agent.http.errors import ApiError, invalid_value
from edge_agent.http.options import ServeOptions
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest, RequestBody
from edge_agent.http.responses import prompt_end
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Options
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.detokenizer import Detokenizer
from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import MAX_GENERATED_TOKENS


async def start_texts(
    client: AsyncClient, body: CompletionRequest, options: ServeOptions
) -> tuple[list[CompletionStream], TargetBundle, list[str]]:
    """Return a stream for each choice of each prompt, the target, and the text that goes before each choice."""
    body.refuse_unsupported()
    _check_choices(body, len(body.prompts), options.max_choices)
    grammar, field = text_grammar(body)
    streams: list[CompletionStream] = []
    with _named(field):
        for prompt in body.prompts:
            streams.append(await client.stream(prompt, **_options(body, len(streams), grammar)))
            await _add_choices(client, body, streams, grammar)
    bundle = await bundle_of(client, body.model)
    echoes = [_echo(prompt, bundle) if body.echo else "" for prompt in body.prompts]
    return streams, bundle, [echo for echo in echoes for _ in range(body.choices)]


async def start_chat(
    client: AsyncClient, body: ChatCompletionRequest, options: ServeOptions, open_end: int | None = None
) -> tuple[list[CompletionStream], TargetBundle, AnswerFormat]:
    """Return a stream for each choice, the target, and the form in which it writes calls and reasoning.

    open_end: most tokens of an answer whose request sets no length, or a quarter of the target's longest sequence if
    that is more, within what the target can hold; None: the SDK's.
    """
    body.refuse_unsupported()
    _check_choices(body, 1, options.max_choices)
    stream = await client.stream_chat(body.template_messages(), body.template_variables(), **body.options(0))
    bundle = await bundle_of(client, body.model)
    source = bundle.template.source if bundle.template is not None else ""
    form = AnswerFormat.of(source, options.answer_format)
    ids, tokenizer = stream.prompt_token_ids, bundle.tokenizer
    special = {tokenizer.table[token].decode(errors="replace"): token for token in tokenizer.special}
    grammar, field = chat_grammar(body, form, source, special, prompt_end(stream, bundle))
    given = _options(body, 0, grammar)
    if open_end is not None and body.token_limit() is None:
        longest = bundle.description.max_sequence
        most, left = min(MAX_GENERATED_TOKENS, max(open_end, longest // 4)), longest - len(ids)
        given["max_tokens"] = min(left, most) if left > 0 else most
    with _named(field):
        streams = [await client.stream(ids, **given)]
        await _add_choices(client, body, streams, grammar)
    for stream in streams:
        stream.show_special(form.markers(calls=bool(body.usable_tools)))
    return streams, bundle, form


def _options(body: RequestBody, choice: int, grammar: str) -> Options:
    """Return the SDK's options. A grammar says where the output ends, so `ignore_eos` has no effect beside one.

    Load generators send it with whatever they measure.
    """
    options = body.options(choice)
    if grammar:
        options["grammar"], options["ignore_eos"] = grammar, False
    return options


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """Name the field of the request that has asked for a grammar, if the grammar is refused."""
    try:
        yield
    except BadRequest as error:
        if error.field == "grammar":
            raise invalid_value(field, f"{field}: {error}") from error
        if error.field == "bytes of the grammar":
            raise invalid_value(field, f"{field} is too large: {error}") from error
        raise


def _check_choices(body: RequestBody, prompts: int, most: int) -> None:
    """Raise ApiError for a request that would take so many slots that others wait."""
    if prompts * body.choices > most:
        raise invalid_value(
            "n" if body.choices > 1 else "prompt",
            f"prompts times n are {prompts} x {body.choices}, must be at most {most}, half of what this server does at "
            "once; ask in several requests, or serve with more --max-sessions",
        )


async def _add_choices(client: AsyncClient, body: RequestBody, streams: list[CompletionStream], grammar: str) -> None:
    """Add the other choices of the last stream's prompt, which is tokenised only once."""
    ids = streams[-1].prompt_token_ids
    for choice in range(len(streams), len(streams) + body.choices - 1):
        await asyncio.sleep(0)  # many ids take a while to check, and other sessions go first
        streams.append(await client.stream(ids, **_options(body, choice, grammar)))


def _echo(prompt: str | list[int], bundle: TargetBundle) -> str:
    if isinstance(prompt, str):
        return prompt
    detokenizer = Detokenizer(bundle.tokenizer.table, bundle.tokenizer.special)
    return "".join(detokenizer.feed(token) for token in prompt if token >= 0) + detokenizer.flush()


async def bundle_of(client: AsyncClient, name: str | None) -> TargetBundle:
    """Return the target. Raises ApiError for the name of another model; no name means this one."""
    bundle = await client.prepare()
    known = bundle.description.target.name
    if name and name != known:
        message = f"the model {name[:200]!r} does not exist here; this server has {known!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return bundle
