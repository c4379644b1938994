"""Reach verifiers and the coordinator: addresses, connections, and how long their answers are waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc

from outrider.core.errors import Unavailable
from outrider.wire.channels import ClientTls, channel, proxy_of
from outrider.wire.v1 import coordinator_pb2 as pb

ROUND_TRIPS = 4
"""Round trips until a call's answer: TCP, TLS, the settings of HTTP/2, and the call itself."""
MAX_RTT_S = 10.0
FIRST_RTT_S, ASSUMED_RTT_S = 1.0, 4.0
"""Least and greatest round trip that is assumed of an address after it was silent, until it is measured."""
CONNECT_S = 12.0
"""Seconds that the first answer over a new connection may take: it is made in three round trips of a second or more."""
BYTES_PER_S = 10_000
"""What an uplink carries at least."""
_RETIRED_S = 600.0
"""Time for which sessions may go on over a connection that takes no new ones."""


class VerifierSilent(Unavailable):
    """The verifier was silent for longer than its heartbeat allows: it hangs, or the network is gone."""


def peer(grant: pb.Grant) -> str:
    """Return which program at which address a grant's verifier is, for messages."""
    if grant.verifier_id:
        return f"the verifier {grant.verifier_id} at {grant.address}, which the coordinator named,"
    return f"the verifier at {grant.address} (--verifier)"


def advice(grant: pb.Grant) -> str:
    """Return what to do if a grant's verifier cannot be reached."""
    if proxied := proxy_of(grant.address):
        return proxied
    if grant.verifier_id:
        return "does it run (`outrider verifiers list`), and is its --advertise an address that devices can reach?"
    return "start it, or give the address of one that runs with --verifier or OUTRIDER_EDGE_VERIFIER"


class Channels:
    """A pool that opens channels on demand and closes them together, with the round trip to each of their addresses.

    So a near peer that is dead is left soon, and a far one is waited for. Each silence of a peer has it waited for
    twice as long the next time: it may be farther away than anybody knows.
    tls: the authorities to trust with TLS. reroute: an address -> the one to dial instead.
    """

    def __init__(
        self, tls: ClientTls | None = None, *, insecure: bool = False, reroute: Mapping[str, str] | None = None
    ) -> None:
        self._tls = tls or ClientTls()
        self._insecure = insecure
        self._reroute = {} if reroute is None else reroute  # an empty one may come to have addresses later
        self.rtt_s: dict[str, float] = {}
        """Address of a verifier -> the round trip that its last heartbeat has shown."""
        self._assumed_s: dict[str, float] = {}
        """Address -> the round trip by which it is waited for: as any answer has shown, or after a silence a guess."""
        self._open: dict[tuple[str, bool, bool], grpc.aio.Channel] = {}
        self._unheard: dict[grpc.aio.Channel, float] = {}
        """Channels over which no answer has come yet, with the times at which they were opened."""
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def get(self, address: str, *, tls: bool = False, bulk: bool = False) -> grpc.aio.Channel:
        """Return the channel to an address. Raises BadRequest for plain text to another machine, unless `insecure`.

        bulk: return a channel apart, for downloads.
        """
        key = (address, tls, bulk)
        if key not in self._open:
            trusted = self._tls if tls else None
            self._open[key] = channel(address, tls=trusted, insecure=self._insecure, bulk=bulk, far=True)
            self._unheard[self._open[key]] = time.monotonic()
        return self._open[key]

    def to(self, grant: pb.Grant, *, bulk: bool = False) -> grpc.aio.Channel:
        """Return the channel to a verifier, as `get` does."""
        return self.get(self._reroute.get(grant.address, grant.address), tls=grant.tls, bulk=bulk)

    def silent(self, address: str, used: grpc.aio.Channel) -> None:
        """Note that no answer came over a channel in time: the next one is waited for longer.

        Further calls open another connection, since this one may be dead, which gRPC notices late, and not at all while
        data comes in one direction. A new one goes on for a while, or a peer far away would never be reached.
        """
        self._assumed_s[address] = min(max(2 * self._assumed_s.get(address, 0.0), FIRST_RTT_S), ASSUMED_RTT_S)
        if time.monotonic() - self._unheard.get(used, 0.0) > CONNECT_S:
            self.retire(used)

    def retire(self, used: grpc.aio.Channel) -> None:
        """Have further calls to a channel's address open another one. Calls that go on may end."""
        for key in [key for key, opened in self._open.items() if opened is used]:
            closing = asyncio.create_task(self._open.pop(key).close(_RETIRED_S))
            self._retired[closing] = used
            closing.add_done_callback(self._retired.pop)
        self._unheard.pop(used, None)

    async def close(self) -> None:
        retired = dict(self._retired)
        for closing in retired:
            closing.cancel()
        for opened in (*retired.values(), *self._open.values()):
            await opened.close()
        self._open.clear()

    def measured(self, address: str, rtt_s: float, used: grpc.aio.Channel) -> None:
        """Take the round trip to an address that an answer over a channel has shown."""
        self._assumed_s[address] = min(rtt_s, MAX_RTT_S)
        self._unheard.pop(used, None)

    def timeout(self, address: str, base_s: float, size: int = 0) -> float:
        """Return the seconds to wait for an answer of an address that takes less than `base_s` if that is near.

        size: bytes that are sent before it.
        """
        return base_s + ROUND_TRIPS * self._assumed_s.get(address, 0.0) + size / BYTES_PER_S
