"""Open channels to verifiers and the coordinator, and wrap one attach's stream in the session protocol's messages."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Self

import grpc

from edge_agent.session.statistics import Statistics
from outrider.core.errors import Unavailable
from outrider.core.protocol.messages import Append, Cancel, Commit, Directive
from outrider.telemetry.traces import call_metadata
from outrider.wire import codecs
from outrider.wire.channels import ClientTls, channel
from outrider.wire.codecs import Open, Opened, Ping
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import ticket_metadata
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1 import session_pb2_grpc


@dataclass(frozen=True)
class ReleaseNotice:
    """The cluster's draft releases have changed; `serial` grows with every change."""

    serial: int


Received = Commit | Opened | Directive | Ping | ReleaseNotice | None
"""A message from the verifier; None for a kind that only newer versions know. A Ping was answered already."""

_FAREWELL_S = 0.3
"""Time that a finished stream may take to end by itself."""
_CONNECT_S = 1.0
"""Additional time for a stream's first message: a lost SYN is sent again only after a second (RFC 6298)."""


class Channels:
    """A pool that opens channels on demand and closes them together. tls: the authorities to trust with TLS."""

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
        for opened in self._open.values():
            await opened.close()
        self._open.clear()


class VerifierSilent(Unavailable):
    """The verifier was silent for longer than its heartbeat allows: it hangs, or the network is gone."""


class VerifierStream:
    """The stream of one attach, which sends in order without making the caller wait, and answers pings.

    Use it as a context manager. peer, advice: as for `error_from_rpc`. Raises core errors: Unavailable for a stream
    that broke, VerifierSilent for silence.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        silence_s: float,
        statistics: Statistics,
        peer: str = "the verifier",
        advice: str = "",
        *,
        ticket: bytes = b"",
    ) -> None:
        self._stub = session_pb2_grpc.VerifierStub(channel)  # type: ignore[no-untyped-call]
        self._silence_s = silence_s
        self._statistics = statistics
        self._peer, self._advice = peer, advice
        self._ticket = ticket
        self._allowed_s = silence_s + _CONNECT_S
        self._outbox: asyncio.Queue[pb.ClientMessage | None] = asyncio.Queue()
        self._call: Any = None
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._call = self._stub.Session(metadata=(*call_metadata(), *ticket_metadata(self._ticket)))
        pump = self._pump = asyncio.create_task(self._write())
        # A write that fails after the end would put an error of its own over the verifier's status (grpc issue 36066).
        self._call.add_done_callback(lambda _: pump.cancel())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._farewell()
        self._call.cancel()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait({self._pump})

    def open(self, message: Open) -> None:
        """Send Open, which must come first."""
        self._put(pb.ClientMessage(open=codecs.open_to_proto(message)))

    def append(self, message: Append) -> None:
        self._put(pb.ClientMessage(append=codecs.append_to_proto(message)))

    def cancel(self, message: Cancel) -> None:
        self._put(pb.ClientMessage(cancel=codecs.cancel_to_proto(message)))

    def draft_in_use(self, release: str) -> None:
        """Say which release proposes the nodes of the following Appends; "" for none."""
        self._put(pb.ClientMessage(draft=pb.DraftInUse(release=release)))

    async def receive(self) -> Received:
        """Return the next message. Raises VerifierSilent if none comes in time, Unavailable if the stream ends."""
        message = await self._read()
        if message is grpc.aio.EOF:
            raise Unavailable("the verifier ended the stream before the sequence was finished")
        self._statistics.bytes_down += message.ByteSize()
        self._allowed_s = self._silence_s
        match message.WhichOneof("kind"):
            case "commit":
                return codecs.commit_from_proto(message.commit)
            case "opened":
                return codecs.opened_from_proto(message.opened)
            case "directive":
                return codecs.directive_from_proto(message.directive)
            case "ping":
                ping = codecs.ping_from_proto(message.ping)
                self._put(pb.ClientMessage(pong=pb.Pong(nonce=ping.nonce)))
                return ping
            case "release":
                return ReleaseNotice(message.release.serial)
        return None

    async def _read(self) -> Any:
        try:
            async with asyncio.timeout(self._allowed_s):
                return await self._call.read()
        except TimeoutError:
            raise VerifierSilent(f"{self._peer} has been silent for {self._allowed_s} s") from None
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._peer, self._advice) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._call.done() and task is not None and not task.cancelling():
                raise Unavailable("the stream was cancelled by the connection") from None
            raise

    def _put(self, message: pb.ClientMessage) -> None:
        self._statistics.bytes_up += message.ByteSize()
        self._outbox.put_nowait(message)

    async def _write(self) -> None:
        """Write what was sent, in order. An error here ends reading too, and is raised there."""
        # Any Exception: a stream that ends meanwhile makes done_writing raise an error that grpc does not export.
        with contextlib.suppress(Exception):
            while (message := await self._outbox.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()

    async def _farewell(self) -> None:
        """Half-close the stream, and wait until the verifier ends it."""
        self._outbox.put_nowait(None)
        if self._pump is not None:
            await asyncio.wait({self._pump})
        with contextlib.suppress(grpc.RpcError):
            while await self._call.read() is not grpc.aio.EOF:
                pass
