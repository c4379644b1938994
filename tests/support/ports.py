"""Find a port for a server that ends and starts again at the same address."""

from __future__ import annotations

import contextlib
import os
import socket

FIRST, BLOCK = 20_000, 90
"""Below the ports that Linux gives out by itself, each process of tests begins to look at another block."""


def unused_port() -> int:
    """Return a port of loopback that nobody listens at, and that nobody else is given while no server has it."""
    for port in range(FIRST + os.getpid() % 128 * BLOCK, 32_768):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port below 32768 is free")
