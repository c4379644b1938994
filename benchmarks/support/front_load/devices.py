"""Run many light devices in one process: each answers every Commit with an Append, and every Ping with a Pong.

    python -m benchmarks.support.front_load.devices HOST:PORT TIMES [--padding ...]

It reads requests from stdin and answers them on stdout, as lines of JSON with an `id`:

{"id": 1, "open": n}       -> {"id": 1, "live": n} once there are n devices, each with a connection of its own
{"id": 2, "seconds": s}    -> {"id": 2, "commits": .., "pings": .., "ended": .., "down": [counts by BUCKET_US]}

A device of the SDK takes more CPU time than the front that is measured. These write HTTP/2 frames themselves: constant
headers, no compression, windows so large that they need no updates. Their messages have the product's frames.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.front_load.shared_times import BUCKET_US, BUCKETS, SharedTimes, now_us
from outrider.core.addresses import split_address
from outrider.core.protocol.messages import Attach
from outrider.wire import codecs
from outrider.wire.frames import METHOD, Frames, Framing
from outrider.wire.v1 import session_pb2 as pb

TOKENS = (5, 66, 777, 8888, 9, 10)
"""Token ids of the nodes of each Append."""
UPS = (0, 1, 1, 2, 2, 1)
"""Distances from the nodes to their parents."""
MAX_TOKENS = 100_000
WINDOW = 1 << 30
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(authority: str, framing: Framing) -> bytes:
    """Return the header block of a call: literals without indexing."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": METHOD,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        **dict(framing.metadata()),
    }
    return b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


class Device:
    """Is one device with one session, on a connection of its own."""

    def __init__(self, name: str, address: str, framing: Framing, load: DeviceLoad) -> None:
        self.opened = self.ended = False
        self.socket = socket.create_connection(split_address(address))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._load = load
        self._frames = Frames(pb.ServerMessage, framing)
        self._received = self._data = b""
        """Bytes of a frame of HTTP/2, and of a message, of which the rest has not come."""
        self._tokens = 0
        settings = frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, WINDOW))
        begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW))
        attach = Attach(epoch=1, prompt=tuple(range(1, 65)), max_tokens=MAX_TOKENS)
        message = pb.ClientMessage(open=codecs.open_to_proto(codecs.Open(name, attach)))
        self.socket.sendall(
            begin + frame(_HEADERS, _END_HEADERS, 1, headers(address, framing)) + self._sent_in_frame(message)
        )

    def read(self) -> None:
        """Take what has come, and answer it in one write."""
        data = self.socket.recv(1 << 16)
        self.ended = self.ended or not data
        data = self._received + data
        answer, at = b"", 0
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            answer += self._answer(data[at + 3], data[at + 4], data[at + 9 : end])
            at = end
        self._received = data[at:]
        if answer:
            self.socket.sendall(answer)

    def _answer(self, kind: int, flags: int, payload: bytes) -> bytes:
        match kind:
            case 0:  # data
                return self._answer_data(payload)
            case 4 if not flags & _ACK:
                return frame(_SETTINGS, _ACK, 0, b"")
            case 6 if not flags & _ACK:
                return frame(_PING, _ACK, 0, payload)
            case 3 | 7:
                self.ended = True
            case 1 if flags & _END_STREAM:
                self.ended = True
        return b""

    def _answer_data(self, payload: bytes) -> bytes:
        data = self._data + payload
        answer = b""
        while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5], "big")):
            message = self._frames.decode(data[5:end])
            data = data[end:]
            if message.HasField("commit"):
                answer += self._append(message.commit)
            elif message.HasField("ping"):
                self._load.pings += 1
                answer += self._sent_in_frame(pb.ClientMessage(pong=pb.Pong(nonce=message.ping.nonce)))
            elif message.HasField("opened"):
                self.opened = True
        self._data = data
        return answer

    def _append(self, commit: pb.Commit) -> bytes:
        """Return an Append whose first id is the time: the front takes any, and the engine without a target, too."""
        self._load.count_commit(commit.evaluated)
        self._tokens = commit.start + len(commit.token)
        append = pb.Append(first_id=now_us(), base=self._tokens, up=UPS, token=TOKENS, idle=True)
        return self._sent_in_frame(pb.ClientMessage(append=append))

    def _sent_in_frame(self, message: pb.ClientMessage) -> bytes:
        data = self._frames.encode(message)
        return frame(_DATA, 0, 1, b"\x00" + struct.pack(">I", len(data)) + data)


class DeviceLoad:
    """Runs the devices of this process, and counts what reaches them."""

    def __init__(self, address: str, times: SharedTimes, framing: Framing) -> None:
        self.commits = self.pings = 0
        self._address = address
        self._times = times
        self._framing = framing
        self._devices: list[Device] = []
        self._selector = selectors.EpollSelector()
        self._down = np.zeros(BUCKETS, np.int64)

    def count_commit(self, step: int) -> None:
        self.commits += 1
        self._down[min(BUCKETS - 1, self._times.since_step_us(step) // BUCKET_US)] += 1

    def open(self, count: int) -> dict[str, Any]:
        """Open devices until there are so many."""
        for number in range(len(self._devices), count):
            device = Device(f"device-{os.getpid()}-{number}", self._address, self._framing, self)
            self._devices.append(device)
            self._selector.register(device.socket, selectors.EVENT_READ, device)
            self._run_once(0.0)
        while not all(device.opened or device.ended for device in self._devices):
            self._run_once(0.1)
        return {"live": sum(not device.ended for device in self._devices)}

    def measure(self, seconds: float) -> dict[str, Any]:
        """Count for so long."""
        self.commits = self.pings = 0
        self._down[:] = 0
        begun, cpu = time.monotonic(), time.process_time()
        while time.monotonic() < begun + seconds:
            self._run_once(0.01)
        return {
            "commits": self.commits,
            "pings": self.pings,
            "ended": sum(device.ended for device in self._devices),
            "down": self._down.tolist(),
            "cpu_share": (time.process_time() - cpu) / (time.monotonic() - begun),
        }

    def watch(self, requests: int) -> bool:
        """Run until a request is there to be read from this file descriptor."""
        self._selector.register(requests, selectors.EVENT_READ)
        try:
            while not self._run_once(1.0):
                pass
        finally:
            self._selector.unregister(requests)
        return True

    def _run_once(self, timeout_s: float) -> bool:
        """Serve the devices for which something has come; return whether there is a request."""
        requested = False
        for key, _ in self._selector.select(timeout_s):
            device: Device | None = key.data
            if device is None:
                requested = True
                continue
            with contextlib.suppress(ConnectionError):
                device.read()
            if device.ended:
                self._selector.unregister(device.socket)
                device.socket.close()
        return requested


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support.front_load.devices", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("times", type=Path)
    parser.add_argument("--padding", default="buckets")
    options = parser.parse_args()
    load = DeviceLoad(options.address, SharedTimes(options.times), Framing(padding=options.padding))
    print(json.dumps({"ready": True}), flush=True)
    while load.watch(sys.stdin.fileno()):
        line = os.read(sys.stdin.fileno(), 1 << 16)  # one request at a time
        if not line:
            return
        request = json.loads(line)
        answer = load.open(request["open"]) if "open" in request else load.measure(request["seconds"])
        print(json.dumps({"id": request["id"]} | answer), flush=True)


if __name__ == "__main__":
    main()
