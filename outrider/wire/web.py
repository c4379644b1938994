"""Run uvicorn inside a process that keeps its own event loop and signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from outrider.core.errors import BadRequest, Unavailable
from outrider.wire.channels import ServerTls, listening

_OURS = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
"""Settings of uvicorn that all our servers share."""


@contextlib.asynccontextmanager
async def serving(
    app: Any, address: str, what: str, *, tls: ServerTls | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Serve an application at HOST:PORT until the body ends; yield its URL, with "/" at its end.

    what: what is served, for messages. settings: uvicorn's. Raises BadRequest for a malformed address or a certificate
    that cannot be used, Unavailable for an address that cannot be listened on.
    """
    if tls is not None:
        settings |= {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
        if tls.client_ca is not None:
            settings |= {"ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    config = uvicorn.Config(app, **(_OURS | settings))
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise BadRequest(f"TLS certificate and key cannot be used: {error}", field="tls") from error
    with contextlib.ExitStack() as stack:
        try:
            listeners = [stack.enter_context(one) for one in listening(address)]
        except OSError as error:
            raise Unavailable(f"{what}: cannot listen on {address}: {error.strerror}; is the port taken?") from error
        for one in listeners:
            # Connections inherit it. asyncio sets it for sockets that name TCP as their protocol, and these do not. An
            # answer's second packet would wait for the acknowledgement of the first, which its reader delays by 40 ms.
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(config)
        # Signals are the process's own.
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        task = asyncio.create_task(server.serve(sockets=listeners))
        try:
            while not server.started:
                if task.done():
                    raise Unavailable(f"{what}: serving at {address} failed") from task.exception()
                await asyncio.sleep(0.01)
            host, port = address.rpartition(":")[0], listeners[0].getsockname()[1]
            yield f"{'https' if tls else 'http'}://{host}:{port}/"
        finally:
            server.should_exit = True
            await asyncio.wait({task})
