"""Draft files over HTTP: GET and HEAD of /artifacts/<64 hex digits>[.gguf] with ranges, and nothing else.

Who may fetch is who knows the name: a hash that only tenants' devices and operators are told. What arrives is held
against the hash of a signed manifest, so nothing here has to be believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from coordinator.api import http_connection
    from outrider.wire import web
except ImportError as error:
    raise ImportError("serving drafts needs starlette and uvicorn: pip install 'outrider[coordinator]'") from error

from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest
from outrider.wire.channels import ServerTls, check_bind, split_address

MAX_CONNECTIONS = 256
"""More are told to come back (503): a download may take minutes."""
STOP_S = 1
"""Downloads under way at the end are cut off after so long; devices resume them elsewhere or later."""
_WILD = ("0.0.0.0", "::", "")
_FOREVER = "public, max-age=31536000, immutable"


def application(artifacts: ArtifactStore) -> Starlette:
    """What answers the requests."""

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
    """Serve until the body ends; yields what the URLs of files begin with: `url` where it is given.

    Raises BadRequest for an address that cannot be told to devices, Unavailable for one that is taken.
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
    async with web.serving(_config(artifacts, tls), address, "drafts") as port:
        yield url or web.url(address, port, tls=tls is not None)


def _config(artifacts: ArtifactStore, tls: ServerTls | None) -> uvicorn.Config:
    try:
        config = web.config(
            application(artifacts),
            http=http_connection.Connection,
            log_level="warning",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=int(http_connection.REQUEST_S),
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=str(tls.cert) if tls else None,
            ssl_keyfile=str(tls.key) if tls else None,
        )
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise BadRequest(f"TLS certificate and key cannot be used: {error}", field="tls") from error
    return config
