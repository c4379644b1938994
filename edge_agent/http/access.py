"""Who may ask, how much, and under which name: the outermost layer, which leaves streams as they are."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_agent.http.options import ServeOptions
from edge_agent.http.problems import Problem, problem_of
from edge_agent.metrics import EdgeMetrics
from outrider.telemetry import logs, traces

log = logging.getLogger(__name__)

_PREFIX = "/v1/"
"""What needs the key, and is worth a line and a span."""
_MAX_PATH = 200
"""Characters of a path in the log."""


class Access:
    """An ASGI middleware: name of the host, API key, bound on bodies, and the request's id (x-request-id; the client's,
    or a new one) in answer, log and the calls that are made for it, in the trace that `traceparent` names.

    Who asks for the head alone gets that of GET; what comes after it is the server's to drop.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: EdgeMetrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name, begun, status = logs.given_request(headers.items()) or secrets.token_hex(16), time.monotonic(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[logs.REQUEST_HEADER] = name
            await send(message)

        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        with logs.about(request=name), _span(scope, headers) as span:
            try:
                await self._answer(asked, headers, receive, tell)
            except Exception as error:
                if status:  # it is too late for another answer
                    raise
                await problem_of(error).response()(asked, receive, tell)
            finally:
                span.note(request_id=name, status=status)
                if status:
                    self._metrics.answered(_route(asked), status)
                _log(scope, status, time.monotonic() - begun)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        problem = self._refusal(scope, headers)
        if problem is not None:
            await problem.response()(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive, self._options.max_body_bytes), send)

    def _refusal(self, scope: Scope, headers: Headers) -> Problem | None:
        hosts, key, most = self._options.hosts, self._options.api_key, self._options.max_body_bytes
        if hosts is not None and (host := _host(headers.get("host", ""))) not in hosts:
            return _strange(host)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            return _too_large(most)
        if key is None or not scope["path"].startswith(_PREFIX) or scope["method"] == "OPTIONS":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode()):
            return None
        return Problem(
            401,
            "the API key is missing or wrong; send this server's as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _bounded(receive: Receive, most: int) -> Receive:
    """A body without a length, or a longer one than it says, is cut off."""
    read = 0

    async def reading() -> Message:
        nonlocal read
        message = await receive()
        if message["type"] == "http.request":
            read += len(message.get("body", b""))
            if read > most:
                raise _too_large(most)
        return message

    return reading


def _too_large(most: int) -> Problem:
    return Problem(413, f"the body is larger than {most} bytes, which is all that is read", code="too_large")


def _strange(host: str) -> Problem:
    return Problem(
        403,
        f"this server is asked as {host[:200]!r}, and without a key answers to its own address alone; set "
        "OUTRIDER_EDGE_SERVE_API_KEY, or allow it with --serve-without-key",
        code="unknown_host",
    )


def _route(scope: Scope) -> str:
    """The path that the router has found; "" for a request that found none, or was refused before."""
    return str(getattr(scope.get("route"), "path", ""))


def _host(given: str) -> str:
    """Of a Host header, without its port; "" where it is none."""
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return ""


def _span(scope: Scope, headers: Headers) -> contextlib.AbstractContextManager[traces.Span]:
    asks = scope["path"].startswith(_PREFIX)
    return traces.span("outrider.http", headers.items()) if asks else contextlib.nullcontext(traces.Span())


def _log(scope: Scope, status: int, spent_s: float) -> None:
    """Who looks after its health does so every few seconds."""
    level = logging.INFO if scope["path"].startswith(_PREFIX) else logging.DEBUG
    log.log(level, "%s %s %d in %.0f ms", scope["method"], scope["path"][:_MAX_PATH], status, 1000 * spent_s)
