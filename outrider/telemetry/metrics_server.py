"""Metrics and health over HTTP: GET /metrics for Prometheus, GET /healthz for whoever decides where to send work.

A door of its own, apart from what devices reach, and on this machine unless its address says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from outrider.wire import web
except ImportError as error:
    raise ImportError("metrics over HTTP need: pip install starlette uvicorn") from error

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

log = logging.getLogger(__name__)

HERE = "127.0.0.1"
MAX_CONNECTIONS = 32
"""Scrapers and probes are few; more are told to come back (503)."""
IDLE_S = 75
"""A scraper's connection is kept so long: longer than the usual minute between two scrapes."""
STOP_S = 1

Ailing = Callable[[], str]
"""Why no work should be sent here; empty where it should."""
Refresh = Callable[[], Awaitable[None]]
"""Called before a scrape is answered. Raises nothing."""


@contextlib.asynccontextmanager
async def serving(
    address: str, registry: CollectorRegistry, ailing: Ailing, refresh: Refresh | None = None
) -> AsyncIterator[str]:
    """Serve until the body ends; yields the URL, which is logged. Raises BadRequest, Unavailable for a taken address.

    address: HOST:PORT, or a port of this machine's loopback alone.
    """
    where = f"{HERE}:{address}" if address.isdigit() else address
    async with web.serving(_config(application(registry, ailing, refresh)), where, "metrics") as port:
        url = f"{web.url(where, port)}metrics"
        log.info("metrics at %s", url)
        yield url


def application(registry: CollectorRegistry, ailing: Ailing, refresh: Refresh | None = None) -> Starlette:
    """What answers the requests."""

    async def metrics(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(request: Request) -> Response:
        why = ailing()
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", health)])


def _config(app: Starlette) -> uvicorn.Config:
    return web.config(
        app,
        http="h11",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
    )
