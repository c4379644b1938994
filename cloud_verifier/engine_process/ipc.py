"""Exchange protobuf messages between front and engine process: length-prefixed frames over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import Message

from outrider.core import errors
from outrider.core.errors import Fenced, InternalError, OutriderError
from outrider.core.text import short_id
from outrider.wire.v1 import engine_pb2 as pb

_HEADER = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
STALLED_S = 0.5
"""Seconds in which a further front must take what the engine writes."""


def frame(message: Message | bytes) -> bytes:
    """Return a message, which may be serialised already, with its length before it."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return _HEADER.pack(len(data)) + data


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[pb.EngineEvent]:
    """Yield the engine's events until its process is gone: a step's, which come together, without waiting between."""
    buffer = bytearray()
    while data := await reader.read(_RECEIVE_BYTES):
        buffer += data
        for body in _bodies(buffer):
            yield pb.EngineEvent.FromString(body)


def _bodies(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole frames out of a buffer, and yield what is in them."""
    taken, body = 0, _HEADER.size
    while len(buffer) >= body:
        (size,) = _HEADER.unpack_from(buffer, taken)
        if len(buffer) < body + size:
            break
        yield bytes(buffer[body : body + size])
        taken = body + size
        body = taken + _HEADER.size
    del buffer[:taken]


@dataclass(eq=False)
class _Front:
    """Holds the engine's end of the socket to one front."""

    sock: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    """The rest of a frame that the socket took in part; it goes out before anything else."""


class EngineEnd:
    """Receives requests and sends events for the engine process's synchronous loop. Any thread may send.

    The verifier's process is the first front, and the engine ends with it. Further fronts connect and leave as they
    like: each gets the events of the sessions that it started, and of those that concern all what a front needs.
    """

    def __init__(self, sock: socket.socket, listener: socket.socket | None = None) -> None:
        """sock: to the verifier's process. listener: accepts the connections of further fronts."""
        self.closed = False
        """Whether the verifier's process has gone."""
        self._first = _Front(sock)
        self._others: dict[int, _Front] = {}
        """Further fronts by file number."""
        self._listener = listener
        self._owners: dict[str, tuple[int, _Front]] = {}
        """session id -> the epoch in which one of the fronts has it; empty without a listener"""
        self._ready: pb.EngineReady | None = None
        self._sending = threading.RLock()

    def receive(self, timeout_s: Callable[[], float | None]) -> Iterator[pb.EngineRequest]:
        """Yield all requests that have come.

        If there are none, wait at most `timeout_s()` seconds (None: without a limit) for one.
        """
        waiting = [self._first.sock, *(front.sock for front in self._others.values())]
        if self._listener is not None:
            waiting.append(self._listener)
        readable = select.select(waiting, [], [], 0.0)[0] or select.select(waiting, [], [], timeout_s())[0]
        if self._listener is None:
            if readable:
                self.closed = not self._read(self._first)
            yield from map(pb.EngineRequest.FromString, _bodies(self._first.buffer))
            return
        for sock in readable:
            if sock is self._listener:
                self._accept(self._listener)
                continue
            front = self._others.get(sock.fileno(), self._first)
            if not self._read(front):
                self.closed |= front is self._first
                yield from self._gone(front)
        fronts = (self._first, *list(self._others.values()))
        come = [(pb.EngineRequest.FromString(body), front) for front in fronts for body in _bodies(front.buffer)]
        # A place that one front has freed may have been taken at another one, whose request must not come first.
        freed: list[tuple[pb.EngineRequest, _Front]] = []
        others: list[tuple[pb.EngineRequest, _Front]] = []
        for one in come:
            (freed if one[0].HasField("stop") and self._owns(*one) else others).append(one)
        for request, front in (*freed, *others):
            if self._owned(request, front):
                yield request

    def send(self, events: list[pb.EngineEvent]) -> None:
        """Send events, each to the front whose session it is about, or to all. Raises ConnectionError without a first
        front."""
        if not events:
            return
        with self._sending:
            if self._listener is None:
                self._write(self._first, map(frame, events))
                return
            due: dict[_Front, list[bytes]] = {}
            for event in events:
                for front, data in self._addressed(event):
                    due.setdefault(front, []).append(data)
            for front, frames in due.items():
                self._write(front, frames)

    def offer(self, event: pb.EngineEvent) -> bool:
        """Send the first front an event if that needs no waiting; return whether it was sent. Raises ConnectionError
        without it.

        A socket that is writable has most of its buffer free (Linux: three quarters), so an offered event leaves room
        for commits.
        """
        front = self._first
        with self._sending:
            if front.unsent or not select.select([], [front.sock], [], 0.0)[1]:
                return False
            data = frame(event)
            with contextlib.suppress(BlockingIOError):
                front.unsent = data[front.sock.send(data, socket.MSG_DONTWAIT) :]
                return True
        return False

    def _read(self, front: _Front) -> bool:
        """Read what has come from a front; return False if it has gone."""
        try:
            data = front.sock.recv(_RECEIVE_BYTES)
        except ConnectionError:
            if front is self._first:
                raise
            data = b""
        front.buffer += data
        return bool(data)

    def _write(self, front: _Front, frames: Iterable[bytes]) -> None:
        """Write frames to a front. One of the further ones that takes nothing for long is cut off, so that the sessions
        of the others go on."""
        try:
            front.sock.sendall(b"".join([front.unsent, *frames]))
            front.unsent = b""
        except OSError:
            if front is self._first:
                raise
            with contextlib.suppress(OSError):
                front.sock.shutdown(socket.SHUT_RDWR)  # the loop reads its end, and stops its sessions

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.settimeout(STALLED_S)
        front = _Front(sock)
        with self._sending:
            self._others[sock.fileno()] = front
            if self._ready is not None:
                self._write(front, [frame(pb.EngineEvent(ready=self._ready))])

    def _gone(self, front: _Front) -> Iterator[pb.EngineRequest]:
        """Forget a front that has ended, and yield what stops its sessions."""
        with self._sending:
            self._others.pop(front.sock.fileno(), None)
            left = [(name, epoch) for name, (epoch, owner) in self._owners.items() if owner is front]
            for name, _ in left:
                del self._owners[name]
        if front is not self._first:
            front.sock.close()
        for name, epoch in left:
            yield pb.EngineRequest(session_id=name, epoch=epoch, stop=pb.Stop())

    def _owns(self, request: pb.EngineRequest, front: _Front) -> bool:
        return self._owners.get(request.session_id) == (request.epoch, front)

    def _owned(self, request: pb.EngineRequest, front: _Front) -> bool:
        """Note whose session a request is about; return False if another front has a later epoch of it, or the same.

        Within one front its streams fence each other before the engine gets a request.
        """
        name, kind = request.session_id, request.WhichOneof("kind")
        with self._sending:
            epoch, owner = self._owners.get(name, (0, front))
            if kind == "start":
                if owner is not front:
                    text = f"session {short_id(name)} is live with epoch"
                    if epoch >= request.epoch:
                        refused = Fenced(f"{text} {epoch} at another front; attach with a greater one than that")
                        self._write(front, [frame(failure_event(refused, name, request.epoch))])
                        return False
                    taken = Fenced(f"{text} {request.epoch} by now")
                    self._write(owner, [frame(failure_event(taken, name, epoch))])
                self._owners[name] = request.epoch, front
                return True
            if owner is not front and epoch == request.epoch:
                return False  # of a start that was refused
            if kind == "stop" and epoch == request.epoch:
                self._owners.pop(name, None)
        return True

    def _addressed(self, event: pb.EngineEvent) -> Iterator[tuple[_Front, bytes]]:
        """Yield the fronts that an event is for, with its frame."""
        if event.session_id:
            epoch, owner = self._owners.get(event.session_id, (0, self._first))
            yield owner if epoch == event.epoch else self._first, frame(event)
            return
        kind, data = event.WhichOneof("kind"), frame(event)
        yield self._first, data
        if kind == "ready":
            self._ready = event.ready
        if kind == "stats":  # of the single sessions only the first front makes reports
            data = frame(pb.EngineEvent(stats=pb.EngineStats(verifier=event.stats.verifier)))
        if kind in ("stats", "alive", "ready"):
            for front in self._others.values():
                yield front, data


def failure_event(error: OutriderError, session_id: str = "", epoch: int = 0) -> pb.EngineEvent:
    """Return the event that ends an epoch of a session with an error, or that says why the engine ends."""
    failure = pb.EngineFailure(
        kind=type(error).__name__,
        message=str(error),
        field=getattr(error, "field", ""),
        retry_after_s=getattr(error, "retry_after_s", 0.0),
    )
    return pb.EngineEvent(session_id=session_id, epoch=epoch, failure=failure)


def error_from_failure(failure: pb.EngineFailure) -> OutriderError:
    """Return the error that `failure_event` was given."""
    cls = getattr(errors, failure.kind, InternalError)
    if not (isinstance(cls, type) and issubclass(cls, OutriderError)):
        return InternalError(failure.message)
    if issubclass(cls, errors.BadRequest):
        return cls(failure.message, field=failure.field)
    if issubclass(cls, errors.Overloaded | errors.Unavailable):
        return cls(failure.message, retry_after_s=failure.retry_after_s)
    return cls(failure.message)
