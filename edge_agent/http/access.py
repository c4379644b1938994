"""Check a request's host name, key and size before it reaches a route, and give it an id in logs and traces."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_agent.http.errors import ApiError, api_error
from edge_agent.http.options import ServeOptions
from edge_agent.metrics import EdgeMetrics
from outrider.telemetry import logs, traces

log = logging.getLogger(__name__)

_PREFIX = "/v1/"
"""Paths that need the key, and are logged and traced."""
_MAX_PATH = 200
"""Most characters of a path in the log."""


class AccessMiddleware:
    """An ASGI middleware that checks host name, API key and body size, and leaves streams as they are.

    It gives each request an id (the client's x-request-id, or a new one) in the answer, the logs and the calls that are
    made for it, in the trace that `traceparent` names. A HEAD request is answered as GET; the server drops the body.
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
        request_id = logs.given_request(headers.items()) or secrets.token_hex(16)
        begun, status, api = time.monotonic(), 0, scope["path"].startswith(_PREFIX)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[logs.REQUEST_HEADER] = request_id
            await send(message)

        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        tracing = traces.span("outrider.http", headers.items()) if api else contextlib.nullcontext(traces.Span())
        with logs.about(request=request_id), tracing as span:
            try:
                if (refusal := self._refusal(scope, headers)) is not None:
                    raise refusal
                await self._app(routed, _bounded(receive, self._options.max_body_bytes), send_with_id)
            except Exception as error:
                if status:  # it is too late for another answer
                    raise
                await api_error(error).response()(routed, receive, send_with_id)
            finally:
                span.note(request_id=request_id, status=status)
                if status:
                    self._metrics.answered(getattr(routed.get("route"), "path", ""), status)
                # Requests for health and metrics come every few seconds.
                level, spent_ms = logging.INFO if api else logging.DEBUG, 1000 * (time.monotonic() - begun)
                log.log(level, "%s %s %d in %.0f ms", scope["method"], scope["path"][:_MAX_PATH], status, spent_ms)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        hosts, key, most = self._options.hosts, self._options.api_key, self._options.max_body_bytes
        if hosts is not None and (host := _host(headers.get("host", ""))) not in hosts:
            return ApiError(
                403,
                f"this server is asked as {host[:200]!r}, and without a key answers to its own address alone; set "
                "OUTRIDER_EDGE_SERVE_API_KEY, or allow it with --serve-without-key",
                code="unknown_host",
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            return _too_large(most)
        if key is None or not scope["path"].startswith(_PREFIX) or scope["method"] == "OPTIONS":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode()):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; send this server's as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _bounded(receive: Receive, most: int) -> Receive:
    """Cut a body off that has no length, or exceeds the one that it gave."""
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


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes, which is all that is read", code="too_large")


def _host(given: str) -> str:
    """Return the name in a Host header, without its port; "" if it is invalid."""
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return ""
