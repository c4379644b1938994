"""Serve files of releases over HTTP: GET and HEAD of /artifacts/<64 hex digits>, and nothing else.

The name may end in .gguf; ranges are served. It is a hash that only tenants' devices and operators learn, and a device
that knows it may fetch the file. The device checks what arrives against the hash of a signed manifest, so it need not
trust this server. It guards against no slow or hostile client, which is a proxy's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from outrider.wire import web
except ImportError as error:
    raise ImportError("serving drafts needs starlette and uvicorn: pip install 'outrider[coordinator]'") from error

from outrider.artifacts.store import ArtifactStore
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest
from outrider.wire.channels import ServerTls, check_bind

MAX_CONNECTIONS = 256
"""Further connections are refused with 503: a download may take minutes."""
IDLE_S = 15
"""Seconds after an answer in which the next request must come."""
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
    async with web.serving(
        application(artifacts),
        address,
        "drafts",
        tls=tls,
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
    ) as own_url:
        yield url or own_url
