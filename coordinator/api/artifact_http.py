"""Serve files of releases over HTTP: GET and HEAD of /artifacts/<64 hex digits>, and nothing else.

The name may end in .gguf; ranges are served. It is a hash that only tenants' devices and operators learn, and a device
that knows it may fetch the file. The device checks what arrives against the hash of a signed manifest, so it need not
trust this server. Connections are few, and an idle one keeps a device from its draft, so silence ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from outrider.wire import web
except ImportError as error:
    raise ImportError("serving drafts needs starlette and uvicorn: pip install 'outrider[coordinator]'") from error

from outrider.artifacts.store import ArtifactStore
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest
from outrider.wire.channels import ServerTls, check_bind

MAX_CONNECTIONS = 256
"""Further connections are refused with 503: a download may take minutes."""
REQUEST_S = 15.0
"""Seconds for a whole request, since the connection was made or the last answer was sent."""
STALL_S = 60.0
"""Seconds in which a client may read nothing of an answer that waits for it."""
PER_PEER = 64
"""Connections from one address; further ones are closed. Many devices may share one address."""
STOP_S = 1
"""Seconds until downloads under way are cut off at the end; devices resume them elsewhere or later."""
_WILD = ("0.0.0.0", "::", "")
_FOREVER = "public, max-age=31536000, immutable"


def application(artifacts: ArtifactStore) -> Starlette:
    """Return the ASGI application that serves a folder of drafts."""

    async def artifact(request: Request) -> Response:
        path = await run_in_threadpool(artifacts.find, request.path_params["name"])
        if path is None:
            return PlainTextResponse("no such draft\n", status_code=404)
        headers = {"etag": f'"{path.stem}"', "cache-control": _FOREVER, "x-content-type-options": "nosniff"}
        return FileResponse(path, headers=headers, media_type="application/octet-stream")

    return Starlette(routes=[Route("/artifacts/{name}", artifact, methods=["GET", "HEAD"])])


@contextlib.asynccontextmanager
async def serving(
    artifacts: ArtifactStore, address: str, *, tls: ServerTls | None = None, insecure: bool = False, url: str = ""
) -> AsyncIterator[str]:
    """Serve until the body ends; yield the prefix of the files' URLs, which is `url` if it is given.

    Raises BadRequest for an address that devices cannot reach, Unavailable for one that is in use.
    """
    check_bind(address, tls, insecure)
    host, _ = split_address(address)
    if not url and host in _WILD:
        raise BadRequest(
            f"http is {address}: that is no address for devices; say with --artifacts-url how they reach it",
            field="http",
        )
    try:
        artifacts.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(
            f"artifacts folder {artifacts.folder} cannot be made: {error.strerror}", field="artifacts"
        ) from error
    config = web.config(
        application(artifacts),
        http=Connection,
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=int(REQUEST_S),
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=str(tls.cert) if tls else None,
        ssl_keyfile=str(tls.key) if tls else None,
        ssl_ca_certs=str(tls.client_ca) if tls and tls.client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise BadRequest(f"TLS certificate and key cannot be used: {error}", field="tls") from error
    async with web.serving(config, address, "drafts") as port:
        yield url or web.url(address, port, tls=tls is not None)


class Connection(H11Protocol):
    """Limits a client's silence, how long answers stay unread, and its address's connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        if self._from_this_address() > PER_PEER:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("request")
        self._stop("stall")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop("stall")
        self._start("stall", STALL_S)

    def resume_writing(self) -> None:
        self._stop("stall")
        super().resume_writing()

    def _await_request(self) -> None:
        """Limit the time of the next request, which may come byte by byte or not at all."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("request")
        elif "request" not in self._timers and not self.transport.is_closing():
            self._start("request", REQUEST_S)

    def _start(self, what: str, limit_s: float) -> None:
        self._timers[what] = self.loop.call_later(limit_s, self.transport.abort)

    def _stop(self, what: str) -> None:
        if timer := self._timers.pop(what, None):
            timer.cancel()

    def _from_this_address(self) -> int:
        """Return the number of connections from this client's address, including this one."""
        if self.client is None:
            return 0
        peers = (getattr(other, "client", None) for other in self.connections)
        return sum(peer is not None and peer[0] == self.client[0] for peer in peers)
