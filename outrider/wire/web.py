"""Run uvicorn inside a process that keeps its own event loop and signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from outrider.core.addresses import split_address
from outrider.core.errors import Unavailable


def config(app: Any, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`. settings: uvicorn's, besides those that all our servers share."""
    common = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
    return uvicorn.Config(app, **(common | settings))


@contextlib.asynccontextmanager
async def serving(config: uvicorn.Config, address: str, what: str) -> AsyncIterator[int]:
    """Serve at HOST:PORT until the body ends; yields the port. what: what is served, for messages.

    Raises BadRequest for a malformed address, Unavailable for one that cannot be listened on.
    """
    with _listening(address, what) as listener:
        server = uvicorn.Server(config)
        # Signals are the process's own.
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    raise Unavailable(f"{what}: serving at {address} failed") from task.exception()
                await asyncio.sleep(0.01)
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await asyncio.wait({task})


def url(address: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of a server at this host and port, with "/" at its end."""
    host, _ = split_address(address)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"


def _listening(address: str, what: str) -> socket.socket:
    host, port = split_address(address)
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(where[:2], family=kind)
    except OSError as error:
        raise Unavailable(f"{what}: cannot listen on {address}: {error.strerror}; is the port taken?") from error
    # Connections inherit it. asyncio sets it for sockets that name TCP as their protocol, and this one does not. An
    # answer's second packet would wait for the acknowledgement of the first, which its reader delays by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
