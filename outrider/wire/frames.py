"""Put the messages of a session's stream into frames: padded, so that sizes tell little, and with a checksum.

The size of a Commit tells how many tokens were accepted, and so something of the text (arXiv 2411.01076). TLS hides no
sizes, and without TLS a changed byte passes TCP's 16-bit sum now and then. The device asks for both in the metadata of
its call; a peer that does not know of them leaves the two fields out.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from outrider.core.errors import BadRequest, Damaged
from outrider.core.protocol.messages import MAX_LOGPROBS
from outrider.wire.status import abort
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1 import session_pb2_grpc

Incoming = TypeVar("Incoming", pb.ClientMessage, pb.ServerMessage)
Padding = Literal["off", "buckets", "constant"]

SERVICE = pb.DESCRIPTOR.services_by_name["Verifier"].full_name
METHOD = f"/{SERVICE}/Session"
CHECKSUM_KEY, PADDING_KEY = "outrider-checksum", "outrider-padding"
CHECKSUM = "crc32"

LEAST_BUCKET = 128
"""Bytes: a Commit of 30 tokens and an Append of 28 nodes fit. Larger buckets are powers of two."""
LARGEST_BUCKET = 4_096
"""Larger messages are padded to a multiple of it."""
CONSTANT = 512
"""Bytes of every message with constant padding: an Append of `in_flight` nodes, by default. Larger ones are padded to a
multiple of it."""
_TOKENS = 32
"""Tokens whose log-probabilities fit the least bucket."""

# A tag is the field's number, shifted by 3, and its wire type: 2 for bytes, 5 for fixed32.
_PADDING_TAG = bytes([14 << 3 | 2])
_CHECKSUM_TAG = bytes([15 << 3 | 5])
_CHECKSUM_BYTES = 5
LEAST_PADDING = 4
"""Bytes of an empty padding field: its tag, and its length as a varint of three bytes."""


@dataclass(frozen=True)
class Framing:
    """Says what the device asks for on one stream."""

    checksum: bool = True
    padding: Padding = "off"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what the call's metadata says of it."""
        checksum = ((CHECKSUM_KEY, CHECKSUM),) if self.checksum else ()
        return checksum if self.padding == "off" else (*checksum, (PADDING_KEY, self.padding))


def framing_of(metadata: Any) -> Framing:
    """Return what a call's metadata asks for.

    Raises Damaged for a checksum or a padding that is not known: no device asks for one, so it was changed on the way.
    """
    values = dict(metadata or ())
    checksum, padding = values.get(CHECKSUM_KEY, ""), values.get(PADDING_KEY, "off")
    if checksum not in ("", CHECKSUM):
        raise Damaged(
            f"{CHECKSUM_KEY} is {checksum!r}, must be {CHECKSUM} or left out: changed on the way? Attach again"
        )
    if padding not in ("off", "buckets", "constant"):
        raise Damaged(
            f"{PADDING_KEY} is {padding!r}, must be off, buckets or constant: changed on the way? Attach again"
        )
    return Framing(bool(checksum), padding)


class Frames(Generic[Incoming]):
    """Encodes the messages that one side of a stream sends, and decodes those that it receives.

    A checksum is of all messages so far, so it also shows one that is missing, repeated or out of order.
    """

    def __init__(self, incoming: type[Incoming], framing: Framing, *, optional: bool = False) -> None:
        """optional: the peer may be older, and leave all checksums out; its first message shows that. It is trusted to
        send no garbage of its own."""
        self._incoming: type[Incoming] = incoming
        self._trusted = optional
        self._padding = framing.padding
        self._sends_checksum = framing.checksum
        self._expects: bool | None = None if optional and framing.checksum else framing.checksum
        self._sent = self._received = 0
        """CRC-32 of all that was sent, and received, checksums left out."""
        self._scale = 1
        """Times by which sizes are greater because the messages carry log-probabilities."""

    def encode(self, message: Message | bytes) -> bytes:
        """Return the bytes to send. message: may be serialised already."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        if self._padding != "off":
            data = self._padded(data)
        if not self._sends_checksum:
            return data
        self._sent = zlib.crc32(data, self._sent)
        return data + _checksum_field(self._sent)

    def decode(self, data: bytes) -> Incoming:
        """Return a message. Raises Damaged if its bytes are not those that were sent, BadRequest if they are none."""
        if self._expects is None:
            whole = zlib.crc32(data[:-_CHECKSUM_BYTES], self._received)
            self._expects = data[-_CHECKSUM_BYTES:] == _checksum_field(whole)
        if self._expects:
            self._received = zlib.crc32(data[:-_CHECKSUM_BYTES], self._received)
            if data[-_CHECKSUM_BYTES:] != _checksum_field(self._received):
                raise Damaged("a message was changed or lost on the way, its checksum is wrong; attach again")
        try:
            message = self._incoming.FromString(data)
        except DecodeError:
            if self._trusted and not self._expects:
                raise Damaged("a message cannot be parsed: it was changed on the way; attach again") from None
            raise BadRequest(f"a message on the stream cannot be parsed, must be a {self._incoming.__name__}") from None
        if message.HasField("checksum") is not self._expects:
            raise Damaged("a message has a checksum where the stream has none: it was changed on the way; attach again")
        return message

    def widen(self, attach: pb.Attach) -> None:
        """Pad to larger sizes if this Attach, which is not checked yet, asks for log-probabilities, since their size
        tells the number of tokens, too."""
        if attach.HasField("logprobs"):
            each = 8 + 8 * min(attach.logprobs, MAX_LOGPROBS)  # of the token, and of each alternative with its id
            self._scale = 1 + _TOKENS * each // LEAST_BUCKET

    def _padded(self, data: bytes) -> bytes:
        least = len(data) + LEAST_PADDING + _CHECKSUM_BYTES * self._sends_checksum
        return data + _padding_field(padded_size(least, self._padding, self._scale) - least)


def field_of(number: int, message: Message) -> bytes:
    """Return a message serialised as the field with this number, below 16, of another one: at a third of the time in
    which protobuf copies it into the other one and serialises that."""
    data = message.SerializeToString()
    length, size = bytearray(), len(data)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + length + data


def padded_size(size: int, padding: Padding, scale: int = 1) -> int:
    """Return the number of bytes to which a message of `size` bytes is padded.

    scale: times by which the sizes are greater, for messages with log-probabilities.
    """
    bucket = (CONSTANT if padding == "constant" else LEAST_BUCKET) * scale
    while bucket < size and bucket < LARGEST_BUCKET and padding == "buckets":
        bucket *= 2
    return -(-size // bucket) * bucket


def _checksum_field(checksum: int) -> bytes:
    return _CHECKSUM_TAG + checksum.to_bytes(4, "little")


@functools.lru_cache(maxsize=LARGEST_BUCKET // 8)
def _padding_field(zeros: int) -> bytes:
    # The length always takes three bytes, so that any size can be reached.
    return _PADDING_TAG + bytes([zeros & 0x7F | 0x80, zeros >> 7 & 0x7F | 0x80, zeros >> 14]) + bytes(zeros)


def add_verifier(servicer: session_pb2_grpc.VerifierServicer, to: grpc.aio.Server) -> None:
    """Serve a verifier's methods; the messages of its sessions go in frames, as each device asks."""

    serve: Callable[..., Any] = servicer.Session

    async def session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            frames = Frames(pb.ClientMessage, framing_of(context.invocation_metadata()))
        except Damaged as error:
            await abort(context, error)
        messages: AsyncGenerator[pb.ServerMessage | bytes, None] = serve(_decoded(requests, frames), context)
        async with contextlib.aclosing(messages):
            async for message in messages:
                yield frames.encode(message)

    framed: Any = grpc.stream_stream_rpc_method_handler(session)
    session_pb2_grpc.add_VerifierServicer_to_server(servicer, to)  # type: ignore[no-untyped-call]
    to.add_registered_method_handlers(SERVICE, {"Session": framed})  # in place of the one that was just added


async def _decoded(requests: AsyncIterator[bytes], frames: Frames[pb.ClientMessage]) -> AsyncIterator[pb.ClientMessage]:
    async for data in requests:
        message = frames.decode(data)
        if message.HasField("open"):
            frames.widen(message.open.attach)
        yield message
