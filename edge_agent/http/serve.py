"""Listening, and ending: `outrider-edge serve` beside its command line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator

try:
    import uvicorn
except ImportError as error:
    raise ImportError("`outrider-edge serve` needs fastapi and uvicorn: pip install 'outrider[edge]'") from error

from edge_agent.client import AsyncClient
from edge_agent.http.app import app_of
from edge_agent.http.options import ServeOptions
from outrider.core.errors import OutriderError, Unavailable
from outrider.wire.channels import split_address

log = logging.getLogger(__name__)

_STOP_S = 3
"""How long requests under way have at the end."""
_AGAIN_S = 2.0


async def serve(client: AsyncClient, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        async with serving(client, options) as url:
            print(f"serving at {url}v1", flush=True)
            await ended.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def serving(client: AsyncClient, options: ServeOptions) -> AsyncIterator[str]:
    """Serve while the body runs; yields the URL, which ends with "/". Raises BadRequest, Unavailable."""
    options.check()
    with _listening(options.listen) as listener:
        server = _Server(
            uvicorn.Config(
                app_of(client, options),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_STOP_S,
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        loading = asyncio.create_task(_load(client))
        try:
            while not server.started:
                if task.done():
                    raise Unavailable(f"serving at {options.listen} failed") from task.exception()
                await asyncio.sleep(0.01)
            host, port = split_address(options.listen)[0], listener.getsockname()[1]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        finally:
            loading.cancel()
            server.should_exit = True
            await asyncio.wait({task, loading})


class _Server(uvicorn.Server):
    """Ends when it is told to."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _load(client: AsyncClient) -> None:
    """Have everything ready before the first request; a cluster that is not there yet is waited for."""
    while True:
        try:
            await client.prepare()
            return
        except OutriderError as error:
            log.warning("the target cannot be loaded yet: %s", error)
        await asyncio.sleep(_AGAIN_S)


def _listening(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(where[:2], family=kind)
    except OSError as error:
        raise Unavailable(f"cannot listen on {address}: {error.strerror}; is the port taken?") from error
