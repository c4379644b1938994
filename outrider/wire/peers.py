"""Read who is at the other end of a call."""

from __future__ import annotations

from urllib.parse import unquote


def host_of(peer: str) -> str:
    """Return the host of a peer as gRPC names it, such as `ipv4:10.0.0.1:7700`; of a name without a port, all of it.

    Calls of one machine that come over different connections have different ports.
    """
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
