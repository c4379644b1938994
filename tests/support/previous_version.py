"""Read the recorded session of the previous version of the protocol, whose messages carry no checksum, or record it.

data/previous_version.json was made with a checkout of the last commit that spoke it, d7e77f2, and the shipped pair:

    git worktree add --detach ../previous d7e77f2
    python tests/support/previous_version.py ../previous

Verifier and device are then that checkout's own, each in a process; what stands between them writes down the bytes of
their session.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from coordinator.cluster import Child
from outrider.wire import codecs
from outrider.wire.channels import bind, channel, server
from outrider.wire.frames import METHOD
from outrider.wire.v1 import session_pb2 as pb

FILE = Path(__file__).parent / "data" / "previous_version.json"
ROOT = Path(__file__).parents[2]
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n"
REQUEST = {"max_tokens": 32, "temperature": 0.8, "seed": 7, "ignore_eos": True}
WINDOW = ("--window-nodes", "6", "--window-depth", "4")
"""Small, so that the whole session has fewer nodes than may be in flight: played again, they may come late."""
DEVICE = """
import asyncio, json, sys
from edge_agent.sdk.client import AsyncClient

async def main(verifier, draft, cache, prompt, request):
    async with AsyncClient(verifier=verifier, draft=draft, cache_dir=cache) as client:
        completion = await client.generate(prompt, **request)
        print(json.dumps(completion.token_ids))

asyncio.run(main(*sys.argv[1:5], json.loads(sys.argv[5])))
"""


@dataclass(frozen=True)
class Recording:
    """A session as it went over the wire. commit: the checkout's. tokens: what the device delivered.

    messages: ("up" from the device or "down" to it, the bytes) in the order in which they came between the two.
    """

    commit: str
    tokens: list[int]
    messages: list[tuple[str, bytes]]

    @property
    def up(self) -> list[pb.ClientMessage]:
        return [pb.ClientMessage.FromString(data) for way, data in self.messages if way == "up"]

    @property
    def down(self) -> list[pb.ServerMessage]:
        return [pb.ServerMessage.FromString(data) for way, data in self.messages if way == "down"]

    @property
    def opening(self) -> codecs.Open:
        return codecs.open_from_proto(self.up[0].open, vocabulary_size=self.down[0].opened.vocabulary_size)

    @property
    def nodes(self) -> dict[int, tuple[int, int, int]]:
        """Return (base, parent, token) by the id of each node that the device sent."""
        return nodes_of(self.up)

    def __str__(self) -> str:
        messages = [(way, data.hex()) for way, data in self.messages]
        return json.dumps(asdict(self) | {"messages": messages}, indent=0) + "\n"


def nodes_of(messages: list[pb.ClientMessage]) -> dict[int, tuple[int, int, int]]:
    """Return (base, parent, token) by the id of each node in a device's messages."""
    nodes = {}
    for append in (message.append for message in messages if message.HasField("append")):
        for node, (up, token) in enumerate(zip(append.up, append.token, strict=True), start=append.first_id):
            nodes[node] = append.base, node - up if up else 0, token
    return nodes


def read() -> Recording:
    """Return the session that is kept in the tests."""
    kept = json.loads(FILE.read_text())
    messages = [(way, bytes.fromhex(data)) for way, data in kept["messages"]]
    return Recording(kept["commit"], kept["tokens"], messages)


class Tap(grpc.GenericRpcHandler):
    """Passes every call on to a verifier, and keeps the messages of sessions."""

    def __init__(self, verifier: grpc.aio.Channel) -> None:
        self._verifier = verifier
        self.messages: list[tuple[str, bytes]] = []

    def service(self, details: Any) -> Any:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            keep = details.method == METHOD

            async def passed() -> AsyncIterator[bytes]:
                async for data in requests:
                    if keep:
                        self.messages.append(("up", data))
                    yield data

            async for data in self._verifier.stream_stream(details.method)(passed()):
                if keep:
                    self.messages.append(("down", data))
                yield data

        return grpc.stream_stream_rpc_method_handler(serve)


async def record(checkout: Path, commit: str, scratch: Path) -> Recording:
    """Run a session of a checkout's verifier and device."""
    environment = {"PYTHONPATH": str(checkout)}
    models = ROOT / "models"
    options = ("--listen", "127.0.0.1:0", "--model", str(models / "target"), *WINDOW)
    command = ("env", "--chdir", str(checkout), sys.executable, "-m", "cloud_verifier.app", *options)
    verifier = await Child.start("verifier", command, environment=environment)
    between = server()
    try:
        async with channel(verifier.address) as to:
            tap = Tap(to)
            between.add_generic_rpc_handlers((tap,))
            port = bind(between, "127.0.0.1:0")
            await between.start()
            arguments = f"127.0.0.1:{port}", str(models / "draft.gguf"), str(scratch), PROMPT, json.dumps(REQUEST)
            device = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", DEVICE, *arguments),
                cwd=checkout,
                env={**os.environ, **environment},
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await device.communicate()
            return Recording(commit, json.loads(output), tap.messages)
    finally:
        await between.stop(0)
        await verifier.stop()


def main() -> None:
    checkout = Path(sys.argv[1]).resolve()
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, check=True, text=True)
    with tempfile.TemporaryDirectory() as scratch:
        FILE.write_text(str(asyncio.run(record(checkout, head.stdout.strip(), Path(scratch)))))


if __name__ == "__main__":
    main()
