"""Serve metrics and health over HTTP: GET /metrics for Prometheus, GET /healthz for load balancers and probes.

It listens on a port of its own, which devices need not reach, and on loopback unless the address says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

try:
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

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 32
"""Scrapers and probes are few; further connections are answered with 503."""
IDLE_S = 75
"""Seconds that an idle connection is kept, longer than the usual minute between two scrapes."""
STOP_S = 1

Unhealthy = Callable[[], str]
"""Returns why no work should be sent to this process; "" if it is healthy."""
Refresh = Callable[[], Awaitable[None]]
"""Called before a scrape is answered. It raises nothing."""


@contextlib.asynccontextmanager
async def serving(
    address: str, registry: CollectorRegistry, unhealthy: Unhealthy, refresh: Refresh | None = None
) -> AsyncIterator[str]:
    """Serve until the body ends; yields the URL of the metrics. Raises BadRequest, Unavailable for a taken address.

    address: HOST:PORT, or a port on loopback alone.
    """
    where = f"{LOOPBACK}:{address}" if address.isdigit() else address
    async with web.serving(
        application(registry, unhealthy, refresh),
        where,
        "metrics",
        http="h11",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
    ) as url:
        log.info("metrics at %smetrics", url)
        yield f"{url}metrics"


def application(registry: CollectorRegistry, unhealthy: Unhealthy, refresh: Refresh | None = None) -> Starlette:
    """Return the application that answers the requests."""

    async def metrics(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(request: Request) -> Response:
        why = unhealthy()
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", health)])
