"""Run the HTTP server of `outrider-edge serve` from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator

try:
    from edge_agent.http.app import app_of
    from edge_agent.http.streaming import first_done
    from outrider.wire import web
except ImportError as error:
    message = f"`outrider-edge serve` needs fastapi and uvicorn ({error}): pip install 'outrider[edge]'"
    raise ImportError(message) from error

from edge_agent.http.options import ServeOptions
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import BadRequest, ModelRefused, OutriderError

log = logging.getLogger(__name__)

_RETRY_S = 2.0


async def serve(client: AsyncClient, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for requests under way.

    Raises what keeps the target from being loaded for good: BadRequest, ModelRefused, VocabularyMismatch, and any error
    that is no OutriderError.
    """
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    async with serving(client, options) as url, contextlib.AsyncExitStack() as handlers:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled.set)
            handlers.callback(loop.remove_signal_handler, number)
        print(f"serving at {url}v1", flush=True)
        async with first_done(_load(client), signalled.wait()) as loading:
            if loading.done():
                loading.result()
            await signalled.wait()


@contextlib.asynccontextmanager
async def serving(client: AsyncClient, options: ServeOptions) -> AsyncIterator[str]:
    """Serve while the body runs, and at most `stop_s` seconds longer; yields the URL, which ends with "/".

    The first request loads the target, unless the body does. Raises BadRequest, Unavailable.
    """
    options.check()
    config = web.config(app_of(client, options), timeout_graceful_shutdown=options.stop_s)
    async with web.serving(config, options.listen, "the HTTP server (--listen)") as port:
        yield web.url(options.listen, port)


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
