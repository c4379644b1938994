"""Limit a client's connection to the server of draft files: silence, unread answers and connections per address.

Connections are few (`coordinator.api.artifact_http.MAX_CONNECTIONS`): an idle one keeps a device from its draft.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 15.0
"""Seconds for a whole request, since the connection was made or the last answer was sent."""
STALL_S = 60.0
"""Seconds in which a client may read nothing of an answer that waits for it."""
PER_PEER = 64
"""Connections from one address; further ones are closed. Many devices may share one address."""


class Connection(H11Protocol):
    """An HTTP connection of uvicorn with time limits."""

    _request_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._from_this_address() > PER_PEER:
            transport.abort()
        else:
            self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_request_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_request_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _start_request_timer(self) -> None:
        """Limit the time of the next request, which may come byte by byte or not at all."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_request_timer()
        elif self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _from_this_address(self) -> int:
        """Return the number of connections from this client's address, including this one."""
        if self.client is None:
            return 0
        peers = (getattr(other, "client", None) for other in self.connections)
        return sum(peer is not None and peer[0] == self.client[0] for peer in peers)
