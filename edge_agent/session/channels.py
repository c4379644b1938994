"""Opens one channel per address, which a client's sessions share."""

from __future__ import annotations

import grpc

from outrider.wire.channels import ClientTls, channel


class Channels:
    """Opens channels on demand and closes them together. tls: the authorities to trust where a peer speaks TLS."""

    def __init__(self, tls: ClientTls | None, *, insecure: bool) -> None:
        self._tls = tls
        self._insecure = insecure
        self._open: dict[tuple[str, bool, bool], grpc.aio.Channel] = {}

    def get(self, address: str, *, tls: bool, bulk: bool = False) -> grpc.aio.Channel:
        """Return the channel to an address. Raises BadRequest for plain text to another machine, unless `insecure`.

        bulk: return a channel apart, for downloads.
        """
        key = (address, tls, bulk)
        if key not in self._open:
            trusted = (self._tls or ClientTls()) if tls else None
            self._open[key] = channel(address, tls=trusted, insecure=self._insecure, bulk=bulk)
        return self._open[key]

    async def close(self) -> None:
        """Close all channels."""
        for opened in self._open.values():
            await opened.close()
        self._open.clear()
