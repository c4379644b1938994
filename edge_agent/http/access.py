"""Who may ask, how much, and under which name: the outermost layer, which leaves streams as they are."""

from __future__ import annotations

import hmac
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_agent.http.problems import Problem

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_MAX_ID = 128
_PREFIX = "/v1/"
"""What needs the key."""


class Access:
    """An ASGI middleware: API key, bound on bodies, x-request-id (the client's, or a new one), a line in the log."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._key = api_key
        self._most = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name, begun, status = _name(headers.get(REQUEST_ID, "")), time.monotonic(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        problem = self._refusal(scope, headers)
        try:
            if problem is not None:
                await problem.response()(scope, receive, tell)
            else:
                await self._app(scope, _bounded(receive, self._most), tell)
        finally:
            spent_ms = 1000 * (time.monotonic() - begun)
            log.info("%s %s %s %d in %.0f ms", name, scope["method"], scope["path"], status, spent_ms)

    def _refusal(self, scope: Scope, headers: Headers) -> Problem | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most:
            return _too_large(self._most)
        if self._key is None or not scope["path"].startswith(_PREFIX) or scope["method"] == "OPTIONS":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key.encode()):
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


def _name(given: str) -> str:
    """The client's, if it can be put into a header and a log."""
    usable = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
    return given if usable else secrets.token_hex(16)
