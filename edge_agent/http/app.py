"""The routes of the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
except ImportError as error:
    raise ImportError("`outrider-edge serve` needs fastapi and uvicorn: pip install 'outrider[edge]'") from error

from edge_agent.http import answers, schema
from edge_agent.http.access import Access
from edge_agent.http.answers import Answer
from edge_agent.http.bodies import Body, ChatBody, CompletionBody
from edge_agent.http.event_stream import DONE, ClientGone, Events, EventStream, event, unless_gone
from edge_agent.http.generation import growing, whole
from edge_agent.http.logprobs import Teller
from edge_agent.http.options import ServeOptions
from edge_agent.http.page import page
from edge_agent.http.problems import Json, Problem, invalid, problem_of
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.completion_stream import CompletionStream
from edge_agent.sdk.types import Chunk
from edge_agent.target.bundle import TargetKit
from edge_agent.target.detokenizer import Detokeniser
from edge_agent.target.tokenizer import TargetTokenizer
from outrider import __version__
from outrider.core.errors import OutriderError
from outrider.telemetry.logs import REQUEST_HEADER

_GONE = 499
"""What nginx calls a request whose client has closed: nobody reads it but the log."""


@dataclass(frozen=True)
class _Asked:
    """A request that was begun: its choices, each with what comes before its text."""

    body: Body
    answer: Answer
    streams: Sequence[CompletionStream]
    prefixes: Sequence[str]
    tokenizer: TargetTokenizer

    def tellers(self) -> list[Teller]:
        """Of each choice's log-probabilities."""
        table, silent = self.tokenizer.table, self.tokenizer.special
        return [Teller(table, silent, chat=self.answer.chat, offset=len(prefix)) for prefix in self.prefixes]


def app_of(client: AsyncClient, options: ServeOptions) -> FastAPI:
    """The application; whoever runs it owns the client."""
    app = FastAPI(
        title="Outrider", version=__version__, middleware=_middleware(client, options), docs_url=None, redoc_url=None
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    for expected in (Problem, OutriderError, ClientGone):
        app.add_exception_handler(expected, _problem)
    _add_completions(app, client, options)
    _add_models(app, client)
    _add_state(app, client)
    return app


def _add_completions(app: FastAPI, client: AsyncClient, options: ServeOptions) -> None:
    @app.post("/v1/completions", response_model=None, responses=schema.told(schema.Completion, streams=True))
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await unless_gone(request, _answer(_texts(client, body, options), options))

    @app.post("/v1/chat/completions", response_model=None, responses=schema.told(schema.ChatCompletion, streams=True))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await unless_gone(request, _answer(_chats(client, body, options), options))


def _add_models(app: FastAPI, client: AsyncClient) -> None:
    @app.get("/v1/models", response_model=None, responses=schema.told(schema.Models))
    async def models() -> Response:
        return Json({"object": "list", "data": [_model(await client.prepare())]})

    @app.get("/v1/models/{name:path}", response_model=None, responses=schema.told(schema.Model))
    async def model(name: str) -> Response:
        kit = await client.prepare()
        _check_model(name, kit)
        return Json(_model(kit))


def _add_state(app: FastAPI, client: AsyncClient) -> None:
    @app.get("/", response_model=None, include_in_schema=False)
    def chat_page() -> Response:
        return page()

    @app.get("/health", response_model=None, responses={200: {"model": schema.Health}, 503: {"model": schema.Health}})
    async def health() -> Response:
        """Whether the target is known and its draft loaded."""
        return Json({"status": "ok"}) if client.ready else Json({"status": "loading"}, 503)

    @app.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def exposition() -> Response:
        return Response(client.metrics.render(), media_type="text/plain; version=0.0.4")


# --- a request


async def _texts(client: AsyncClient, body: CompletionBody, options: ServeOptions) -> _Asked:
    body.refuse_unsupported()
    _check_choices(body, len(body.prompts), options.max_choices)
    streams: list[CompletionStream] = []
    for prompt in body.prompts:
        streams.append(await client.stream(prompt, **body.options(len(streams))))
        await _add_choices(client, body, streams)
    kit = await _checked_kit(client, body)
    told = [_echoed(prompt, kit) if body.echo else "" for prompt in body.prompts]
    prefixes = [prefix for prefix in told for _ in range(body.choices)]
    return _Asked(body, _answer_of(kit, chat=False), streams, prefixes, kit.tokenizer)


async def _chats(client: AsyncClient, body: ChatBody, options: ServeOptions) -> _Asked:
    body.refuse_unsupported()
    _check_choices(body, 1, options.max_choices)
    streams = [await client.stream_chat(body.turns(), **body.options(0))]
    await _add_choices(client, body, streams)
    kit = await _checked_kit(client, body)
    return _Asked(body, _answer_of(kit, chat=True), streams, [""] * len(streams), kit.tokenizer)


def _check_choices(body: Body, prompts: int, most: int) -> None:
    """Raises Problem for a request that would leave no place for others."""
    if prompts * body.choices > most:
        raise Problem(
            400,
            f"prompts times n are {prompts} x {body.choices}, must be at most {most}, half of what this server does at "
            "once; ask in several requests, or serve with more --max-sessions",
            param="n" if body.choices > 1 else "prompt",
            code="invalid_value",
        )


async def _add_choices(client: AsyncClient, body: Body, streams: list[CompletionStream]) -> None:
    """The other choices of the last stream's prompt, whose ids are made once."""
    ids = streams[-1].prompt_token_ids
    for choice in range(len(streams), len(streams) + body.choices - 1):
        await asyncio.sleep(0)  # many ids take a while to check: other sessions first
        streams.append(await client.stream(ids, **body.options(choice)))


async def _checked_kit(client: AsyncClient, body: Body) -> TargetKit:
    """The target, which a stream has loaded; nothing was asked of it yet. Raises Problem where another one is meant."""
    kit = await client.prepare()
    _check_model(body.model, kit)
    return kit


async def _answer(asking: Awaitable[_Asked], options: ServeOptions) -> Response:
    """The whole answer, or its first event with the rest to come."""
    asked = await asking
    if not asked.body.stream:
        completions = await whole(asked.streams)
        content = asked.answer.whole(completions, asked.prefixes, asked.tellers())
        return Json({**content, "usage": answers.usage_of(completions, _prompts(asked))})
    events = _events(asked)
    try:
        return EventStream(await anext(events), events, options.stall_s)
    except BaseException:
        await events.aclose()
        raise


async def _events(asked: _Asked) -> Events:
    """What fails before the first chunk is raised, later it is an event."""
    begun = False
    try:
        async with contextlib.aclosing(_contents(asked)) as contents:
            async for content in contents:
                begun = True
                yield event(content)
    except Exception as error:
        if not begun:
            raise
        yield event(problem_of(error, chat=asked.answer.chat).body)
    yield DONE


async def _contents(asked: _Asked) -> AsyncGenerator[dict[str, Any], None]:
    """Every event's content; with `include_usage` all have the field."""
    answer, usage = asked.answer, {"usage": None} if asked.body.includes_usage else {}
    provenance, tellers = asked.body.provenance, asked.tellers()
    begun: set[int] = set()
    async with contextlib.aclosing(growing(asked.streams)) as growth:
        async for grown in growth:
            choice, stream = grown.choice, asked.streams[grown.choice]
            if choice not in begun:
                begun.add(choice)
                if answer.chat or asked.prefixes[choice]:
                    yield {**answer.begins(choice, asked.prefixes[choice]), **usage}
            if grown.chunk is None:
                yield {**answer.ends(choice, stream.completion), **usage}
            elif _worth_telling(grown.chunk) or provenance:
                told = _told(asked, grown.chunk, stream) if provenance else None
                yield {**answer.goes_on(choice, grown.chunk, tellers[choice], told), **usage}
    if usage:
        yield answer.usage(answers.usage_of([stream.completion for stream in asked.streams], _prompts(asked)))


def _told(asked: _Asked, chunk: Chunk, stream: CompletionStream) -> dict[str, Any]:
    tokenizer = asked.tokenizer
    return answers.tokens_told(chunk, stream.statistics, tokenizer.table, tokenizer.special)


def _worth_telling(chunk: Chunk) -> bool:
    """Half a character is no event."""
    return bool(chunk.text or chunk.logprobs or not chunk.verified)


def _prompts(asked: _Asked) -> list[int]:
    """The tokens of each prompt."""
    return [stream.completion.usage.prompt_tokens for stream in asked.streams[:: asked.body.choices]]


def _echoed(prompt: str | list[int], kit: TargetKit) -> str:
    if isinstance(prompt, str):
        return prompt
    detokeniser = Detokeniser(kit.tokenizer.table, kit.tokenizer.special)
    return "".join(detokeniser.feed(token) for token in prompt if token >= 0) + detokeniser.flush()


# --- the target as a model


def _answer_of(kit: TargetKit, *, chat: bool) -> Answer:
    return Answer(kit.description.target.name, _fingerprint(kit), chat)


def _fingerprint(kit: TargetKit) -> str:
    return f"fp_{kit.description.target.weights_hash.removeprefix('sha256:')[:16]}"


def _check_model(name: str | None, kit: TargetKit) -> None:
    """Raises Problem for another model; none is this one."""
    known = kit.description.target.name
    if name and name != known:
        raise Problem(
            404,
            f"the model {name[:200]!r} does not exist here; there is {known!r}",
            param="model",
            code="model_not_found",
        )


def _model(kit: TargetKit) -> dict[str, Any]:
    description = kit.description
    return {
        "id": description.target.name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": description.max_sequence,
        "draft": kit.drafts.name if kit.drafts is not None else None,
    }


# --- errors


async def _problem(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=_GONE)
    return problem_of(error, chat=request.scope["path"].startswith("/v1/chat/")).response()


async def _http_problem(request: Request, error: Exception) -> Response:
    """What the router finds: an unknown path, a wrong method, a body that cannot be read."""
    if not isinstance(error, HTTPException):
        return problem_of(error).response()
    if isinstance(error.__cause__, Problem):  # of a body that was cut off while it was read
        return error.__cause__.response()
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_value")
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"{request.method} {request.scope['path'][:200]} is not served here; GET /openapi.json tells what is"
    return Problem(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def _invalid(_: Request, error: Exception) -> Response:
    """The first field that is wrong, by name."""
    return invalid(error.errors() if isinstance(error, RequestValidationError) else []).response()


def _middleware(client: AsyncClient, options: ServeOptions) -> list[Middleware]:
    """Outermost first: refusals have CORS headers, too, or a page could not read them."""
    access = Middleware(Access, options=options, metrics=client.metrics)
    if not options.cors_origins:
        return [access]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_HEADER],
    )
    return [cors, access]
