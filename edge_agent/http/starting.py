"""Start the sessions that answer a request."""

from __future__ import annotations

import asyncio

from edge_agent.http.errors import ApiError, invalid_value
from edge_agent.http.options import ServeOptions
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest, RequestBody
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.detokenizer import Detokenizer


async def start_texts(
    client: AsyncClient, body: CompletionRequest, options: ServeOptions
) -> tuple[list[CompletionStream], TargetBundle, list[str]]:
    """Return a stream for each choice of each prompt, the target, and the text that goes before each choice."""
    body.refuse_unsupported()
    _check_choices(body, len(body.prompts), options.max_choices)
    streams: list[CompletionStream] = []
    for prompt in body.prompts:
        streams.append(await client.stream(prompt, **body.options(len(streams))))
        await _add_choices(client, body, streams)
    bundle = await bundle_of(client, body.model)
    echoes = [_echo(prompt, bundle) if body.echo else "" for prompt in body.prompts]
    return streams, bundle, [echo for echo in echoes for _ in range(body.choices)]


async def start_chat(
    client: AsyncClient, body: ChatCompletionRequest, options: ServeOptions, open_end: int | None = None
) -> tuple[list[CompletionStream], TargetBundle, AnswerFormat]:
    """Return a stream for each choice, the target, and the form in which it writes calls and reasoning.

    open_end: most tokens of an answer whose request sets no length, within what the target can hold; None: the SDK's.
    """
    body.refuse_unsupported()
    _check_choices(body, 1, options.max_choices)
    streams = [await client.stream_chat(body.template_messages(), body.template_variables(), **body.options(0))]
    bundle = await bundle_of(client, body.model)
    if open_end is not None and body.token_limit() is None:
        ids = streams[0].prompt_token_ids
        left = bundle.description.max_sequence - len(ids)
        limit = min(left, open_end) if left > 0 else open_end
        given = body.options(0)
        given["max_tokens"] = limit
        streams = [await client.stream(ids, **given)]
    await _add_choices(client, body, streams)
    source = bundle.template.source if bundle.template is not None else ""
    form = AnswerFormat.of(source, options.answer_format)
    for stream in streams:
        stream.show_special(form.markers(calls=bool(body.usable_tools)))
    return streams, bundle, form


def _check_choices(body: RequestBody, prompts: int, most: int) -> None:
    """Raise ApiError for a request that would take so many slots that others wait."""
    if prompts * body.choices > most:
        raise invalid_value(
            "n" if body.choices > 1 else "prompt",
            f"prompts times n are {prompts} x {body.choices}, must be at most {most}, half of what this server does at "
            "once; ask in several requests, or serve with more --max-sessions",
        )


async def _add_choices(client: AsyncClient, body: RequestBody, streams: list[CompletionStream]) -> None:
    """Add the other choices of the last stream's prompt, which is tokenised only once."""
    ids = streams[-1].prompt_token_ids
    for choice in range(len(streams), len(streams) + body.choices - 1):
        await asyncio.sleep(0)  # many ids take a while to check, and other sessions go first
        streams.append(await client.stream(ids, **body.options(choice)))


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
