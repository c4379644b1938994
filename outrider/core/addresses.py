"""Read addresses of the form HOST:PORT."""

from __future__ import annotations

from outrider.core.errors import BadRequest

DEFAULT_COORDINATOR = "127.0.0.1:7700"
"""HOST:PORT at which a coordinator listens, and is asked, if nothing else is set. Loopback, so that nothing is open by
accident."""
DEFAULT_STATE_DIR = "~/.outrider/coordinator"
"""Folder in which a coordinator keeps its keys, if nothing else is set."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[v6]:port`. Raises BadRequest."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65_536
    if not (colon and host and is_port) or (":" in host and not bracketed):
        raise BadRequest(f"address is {address[:300]!r}, must be HOST:PORT or [V6]:PORT", field="address")
    return host, int(port)
