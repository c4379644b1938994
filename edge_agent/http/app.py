"""Define the routes of the OpenAI-compatible server, and its chat page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from edge_agent.config import EdgeSettings
from edge_agent.http.access import AccessMiddleware, key_of
from edge_agent.http.errors import ApiError, api_error, invalid_body, json_response, refused
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest, StreamOptions
from edge_agent.http.responses import IGNORED_HEADER, CompletionWriter, naming_ignored
from edge_agent.http.responses_api.routes import add_responses
from edge_agent.http.starting import bundle_of, start_chat, start_texts
from edge_agent.http.streaming import DONE, Events, drained, event, merged, streamed, unless_gone
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Chunk
from edge_agent.target.bundle import TargetBundle
from outrider import __version__
from outrider.core.errors import OutriderError, Overloaded
from outrider.telemetry.logs import REQUEST_HEADER

ANSWER_S = 2.7
"""Seconds in which a health check, which waits 3, gets an answer."""
FRESH_S = 5.0
"""Seconds for which a probe's result stands."""


def app_of(client: AsyncClient, settings: EdgeSettings) -> FastAPI:
    """Return the application; the caller owns the client."""
    app = FastAPI(
        title="Outrider", version=__version__, middleware=_middleware(client, settings), docs_url=None, redoc_url=None
    )
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    _add_completions(app, client, settings)
    add_responses(app, client, settings)
    _add_models(app, client)
    _add_state(app, client)
    return app


def _add_completions(app: FastAPI, client: AsyncClient, settings: EdgeSettings) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await unless_gone(request, _answer(client, body, settings))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await unless_gone(request, _answer(client, body, settings))


def _add_models(app: FastAPI, client: AsyncClient) -> None:
    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(await client.prepare())]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        return json_response(_model_card(await bundle_of(client, name)))


def _add_state(app: FastAPI, client: AsyncClient) -> None:
    @app.get("/", response_model=None, include_in_schema=False)
    def chat_page() -> Response:
        html, policy = _page()
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    probing, probed, until = asyncio.Lock(), "", float("-inf")

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Return that this process lives, whatever has become of its cluster."""
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Return whether a request would be served: target and draft are loaded, and coordinator and verifier answer or
        the draft may write alone."""
        nonlocal probed, until
        async with probing:
            if time.monotonic() >= until:
                probed, until = await _probed(client), time.monotonic() + FRESH_S
            why = probed
        if client.ready and (not why or client.writes_offline):
            return json_response({"status": "offline" if why else "ready", "reason": why or None})
        status = "unreachable" if why else "loading"
        return json_response({"status": status, "reason": why or "target and draft are being loaded"}, 503)

    @app.get("/metrics", response_model=None)
    async def exposition() -> Response:
        return Response(client.metrics.render(), media_type="text/plain; version=0.0.4")


async def _probed(client: AsyncClient) -> str:
    """Return why a request would fail now; "" if it would be served."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.probe()
    except TimeoutError:
        return f"the cluster has not answered within {ANSWER_S:g} s"
    except OutriderError as error:
        return "" if isinstance(error, Overloaded) else str(error)  # a full one is there, and requests wait for room
    return ""


# --- completions


async def _answer(
    client: AsyncClient, body: CompletionRequest | ChatCompletionRequest, settings: EdgeSettings
) -> Response:
    """Return the whole answer, or its first event with the rest to come."""
    if isinstance(body, ChatCompletionRequest):
        streams, bundle, parsers = await start_chat(client, body, settings)
        writer = CompletionWriter(body, bundle, streams, [""] * len(streams), parsers)
    else:
        streams, bundle, prefixes = await start_texts(client, body, settings)
        writer = CompletionWriter(body, bundle, streams, prefixes)
    if body.stream:
        options = body.stream_options or StreamOptions()
        response = await streamed(
            _events(writer, options),
            writer.streams,
            lambda error: event(api_error(error, chat=writer.chat).body) + DONE,
        )
    else:
        response = json_response(writer.whole(await drained(writer.streams)))
    return naming_ignored(response, body.ignored, body.notes)


async def _events(writer: CompletionWriter, options: StreamOptions) -> Events:
    def write(choice: int, chunk: Chunk | None) -> list[dict[str, Any]]:
        contents = [*writer.chunks(choice, chunk)]
        if options.include_usage:
            usage = writer.usage_so_far(choice) if options.continuous_usage_stats else None
            contents = [{**content, "usage": usage} for content in contents]
        return contents

    async with contextlib.aclosing(merged(writer.streams, write)) as contents:
        async for content in contents:
            yield event(content)
    if options.include_usage:
        yield event(writer.usage())
    yield DONE


# --- the target as a model


def _model_card(bundle: TargetBundle) -> dict[str, Any]:
    description = bundle.description
    return {
        "id": description.target.name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": description.max_sequence,
        "draft": bundle.draft.name if bundle.draft is not None else None,
    }


# --- errors


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what the router finds: an unknown path, a wrong method, a body that cannot be read."""
    if not isinstance(error, HTTPException):
        return refused(request.scope, api_error(error))
    if isinstance(error.__cause__, ApiError):  # the body was cut off while it was read
        return refused(request.scope, error.__cause__)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_value")
    message = str(error.detail)
    if error.status_code in (404, 405):
        path = request.scope["path"][:200]
        message = f"{request.method} {path} is not served here; GET /openapi.json lists what is"
        if any(route.path == f"/v1{path}" for route in request.app.routes if isinstance(route, APIRoute)):
            message = f"{request.method} {path} is not served here, but /v1{path} is: the base URL ends with /v1"
    answer = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    return refused(request.scope, answer)


async def _invalid_body(request: Request, error: Exception) -> Response:
    return refused(request.scope, invalid_body(error.errors() if isinstance(error, RequestValidationError) else []))


def _middleware(client: AsyncClient, settings: EdgeSettings) -> list[Middleware]:
    """Return the middleware, outermost first: refusals need CORS headers, too, or a page could not read them."""
    access = Middleware(AccessMiddleware, settings=settings, metrics=client.metrics)
    if key_of(settings) is None:  # any page that a user opens could use the cluster
        return [access]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_HEADER, IGNORED_HEADER],
    )
    return [cors, access]


# --- the chat page


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page, and a policy that runs what stands in its file and nothing that a text could bring in."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return html, (
        f"default-src 'none'; script-src {_hash('script', html)}; style-src {_hash('style', html)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(element: str, html: str) -> str:
    """Return the content of the page's one element of this name, as a source in a policy."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
