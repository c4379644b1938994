"""Run the HTTP server of `outrider-edge serve` from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator

try:
    from edge_agent.http.access import key_of
    from edge_agent.http.app import app_of
    from edge_agent.http.streaming import first_done
    from outrider.wire import web
except ImportError as error:
    message = f"`outrider-edge serve` needs fastapi and uvicorn ({error}): pip install 'outrider[edge]'"
    raise ImportError(message) from error

from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest, ModelRefused, OutriderError
from outrider.wire.channels import is_loopback

log = logging.getLogger(__name__)

STOP_S = 20.0
"""Seconds that running requests have to finish once the server stops."""
KEEP_ALIVE_S = 90
"""Seconds for which an idle connection stays open: clients and proxies keep theirs for 60 to 75."""
_RETRY_S = 2.0


def check(settings: EdgeSettings) -> None:
    """Raise BadRequest for settings with which it would be unsafe or impossible to serve."""
    split_address(settings.serve_listen)
    key = key_of(settings)
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise BadRequest("the server's API key must be a text of printable ASCII characters", field="api_key")
    if key is None and not settings.serve_without_key and not is_loopback(settings.serve_listen):
        raise BadRequest(
            f"listen is {settings.serve_listen}: others than this machine could use the cluster without a key; set "
            "OUTRIDER_EDGE_SERVE_API_KEY, or allow it with --serve-without-key",
            field="listen",
        )


async def serve(client: AsyncClient, settings: EdgeSettings) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for requests under way.

    Raises what keeps the target from being loaded for good: BadRequest, ModelRefused, VocabularyMismatch, and any error
    that is no OutriderError.
    """
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    async with serving(client, settings) as url, contextlib.AsyncExitStack() as handlers:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled.set)
            handlers.callback(loop.remove_signal_handler, number)
        print(f"serving at {url}v1", flush=True)
        async with first_done(_load(client), signalled.wait()) as loading:
            if loading.done():
                loading.result()
            await signalled.wait()


@contextlib.asynccontextmanager
async def serving(client: AsyncClient, settings: EdgeSettings) -> AsyncIterator[str]:
    """Serve while the body runs, and at most STOP_S seconds longer; yields the URL, which ends with "/".

    The first request loads the target, unless the body does. Raises BadRequest, Unavailable.
    """
    check(settings)
    app, what = app_of(client, settings), "the HTTP server (--listen)"
    times = {"timeout_graceful_shutdown": STOP_S, "timeout_keep_alive": KEEP_ALIVE_S}
    async with web.serving(app, settings.serve_listen, what, tls=None, **times) as url:
        yield url


async def _load(client: AsyncClient) -> None:
    """Load the target before the first request; waits for a cluster that is not there yet."""
    while True:
        try:
            await client.prepare()
            return
        except (BadRequest, ModelRefused):  # VocabularyMismatch, too: no further try mends a draft that does not fit
            raise
        except OutriderError as error:
            log.warning("the target cannot be loaded yet: %s", error)
        await asyncio.sleep(_RETRY_S)
