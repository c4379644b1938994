"""Check a request's host name, API key and body size before its route runs, and give it an id in logs and traces."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_agent.config import EdgeSettings
from edge_agent.http.errors import REASON, ApiError, api_error, refused
from edge_agent.http.streaming import STOPPING, ClientGone
from edge_agent.metrics import EdgeMetrics
from outrider.core.addresses import split_address
from outrider.telemetry import logs, traces

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
_API_PREFIX = "/v1/"
"""Paths that begin so need the API key, are logged at INFO (others at DEBUG) and are traced."""
_CLIENT_CLOSED = 499
"""nginx's status for a request whose client has closed; only the log shows it."""
_MAX_PATH = 200
"""Characters of a path that are logged at most."""


def key_of(settings: EdgeSettings) -> str | None:
    """Return the key that clients must send; None asks for none."""
    return None if settings.serve_api_key is None else settings.serve_api_key.get_secret_value()


class AccessMiddleware:
    """An ASGI middleware that checks host name, API key and body size, and passes streams on without buffering them.

    Each request has an id, its x-request-id or a new one, in the response, the logs and the calls made for it. An API
    request continues the trace of its `traceparent`. A HEAD request is routed as GET; the HTTP server omits the body.
    """

    def __init__(self, app: ASGIApp, settings: EdgeSettings, metrics: EdgeMetrics) -> None:
        self._app = app
        self._key = key_of(settings)
        self._hosts: set[str] | None = None
        """The host names that requests may use; None is any. A web page can point a name of its own at loopback, and
        its browser then takes this server for the page's own: without a key nothing else would keep the page out."""
        if self._key is None and not settings.serve_without_key:
            self._hosts = {"localhost", "127.0.0.1", "::1", split_address(settings.serve_listen)[0].lower()}
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = logs.request_id_from(headers.items()) or secrets.token_hex(16)
        started, status, is_api = time.monotonic(), 0, scope["path"].startswith(_API_PREFIX)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[logs.REQUEST_HEADER] = request_id
            await send(message)

        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        tracing = traces.span("outrider.http", headers.items()) if is_api else contextlib.nullcontext(traces.Span())
        with logs.about(request=request_id), tracing as span:
            try:
                if (refusal := self._refusal(scope, headers)) is not None:
                    raise refusal
                await self._app(routed, _limit_body(receive), send_with_id)
            except (Exception, asyncio.CancelledError) as error:
                if status:  # the response has started, so no other can be sent
                    raise
                answer = Response(status_code=_CLIENT_CLOSED)
                if not isinstance(error, ClientGone):
                    known = error if isinstance(error, Exception) else STOPPING
                    answer = refused(routed, api_error(known, chat=scope["path"].startswith("/v1/chat/")))
                await answer(routed, receive, send_with_id)
            finally:
                span.note(request_id=request_id, status=status)
                if status:
                    self._metrics.answered(getattr(routed.get("route"), "path_format", ""), status)
                # Other requests, for health and metrics, come every few seconds.
                level, elapsed_ms = logging.INFO if is_api else logging.DEBUG, 1000 * (time.monotonic() - started)
                line = f"{scope['method']} {scope['path'][:_MAX_PATH]} {status} in {elapsed_ms:.0f} ms"
                log.log(level, "%s%s", line, f": {routed[REASON]}" if REASON in routed else "")

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Return the error with which the request is refused, by its headers alone; None if it is allowed."""
        hosts, key = self._hosts, self._key
        if hosts is not None and (host := _host(headers.get("host", ""))) not in hosts:
            return ApiError(
                403,
                f"the Host header names {host[:200]!r}; without an API key, this server accepts only its own: set "
                "OUTRIDER_EDGE_SERVE_API_KEY, or start it with --serve-without-key",
                code="unknown_host",
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _too_large()
        if key is None or not scope["path"].startswith(_API_PREFIX) or scope["method"] == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key.encode()):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; send this server's key as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _limit_body(receive: Receive) -> Receive:
    """Return a `receive` that raises ApiError (413) after MAX_BODY_BYTES, whatever content-length says."""
    read_bytes = 0

    async def limited_receive() -> Message:
        nonlocal read_bytes
        message = await receive()
        if message["type"] == "http.request":
            read_bytes += len(message.get("body", b""))
            if read_bytes > MAX_BODY_BYTES:
                raise _too_large()
        return message

    return limited_receive


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes, the limit of this server", code="too_large")


def _host(header: str) -> str:
    """Return the host name in a Host header, without the port; "" if the header is invalid."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
