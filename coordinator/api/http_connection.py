"""One client's connection to the server of draft files: it may not stay silent, stop reading or come in crowds.

Places are few (`coordinator.api.artifact_http.MAX_CONNECTIONS`):
whoever holds one for nothing keeps a device from its draft.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 15.0
"""Until a request has come whole, since the connection was made or the answer before was sent."""
STALL_S = 60.0
"""In which a client takes none of the answer that waits for it: then it has gone, or does not want it."""
PER_PEER = 64
"""Connections from one address; further ones are closed. Many devices may stand behind one."""


class Connection(H11Protocol):
    """Everything else is uvicorn's."""

    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._beside() > PER_PEER:
            transport.abort()
        else:
            self._hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._going_on()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._hurry()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._hurry()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._going_on()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._going_on()
        super().resume_writing()

    def _hurry(self) -> None:
        """A request that comes byte by byte has no more time than one that does not come."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._in_time()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _going_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _beside(self) -> int:
        """Connections from this one's address, itself included."""
        if self.client is None:
            return 0
        peers = (getattr(other, "client", None) for other in self.connections)
        return sum(peer is not None and peer[0] == self.client[0] for peer in peers)
