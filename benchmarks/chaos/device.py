"""Run sessions of the SDK in a process of their own, a device of benchmarks.chaos, by JSON lines.

{"id": n, "prompt": [...], "options": {...}}   -> {"id": n, "tokens": [...], ...}, when the session has ended
{"id": n, "slow_s": s}                         -> {"id": n} at once; for so long no session reads what has come
The end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import OutriderError
from outrider.telemetry.logs import configure
from outrider.wire.channels import ClientTls

NOTABLE_S = 0.5
"""Waits for a chunk that are reported, from so many seconds on."""


class Device:
    """Runs the sessions of one client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._slow_until = 0.0

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return how a session ended, or begin to read slowly."""
        if "slow_s" in request:
            self._slow_until = time.monotonic() + request["slow_s"]
            return {}
        return await self._session(request["prompt"], request["options"])

    async def _session(self, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
        tokens: list[int] = []
        waits: list[tuple[float, float]] = []
        result: dict[str, Any] = {"tokens": tokens, "waits": waits, "error": "", "message": "", "typed": True}
        stream = None
        began = time.monotonic()
        try:
            stream = await self._client.stream(prompt, **options)
            async with stream:
                while True:
                    chunk = await stream.next()
                    now = time.monotonic()
                    if now - began >= NOTABLE_S:
                        waits.append((began, now))
                    if chunk is None:
                        break
                    tokens += chunk.token_ids
                    await asyncio.sleep(max(0.0, self._slow_until - now))
                    began = time.monotonic()
        except Exception as error:
            waits.append((began, time.monotonic()))
            result |= {
                "error": type(error).__name__,
                "message": str(error)[:500],
                "typed": isinstance(error, OutriderError),
            }
        if stream is not None:
            result |= {"session": stream.statistics.session_id, "attaches": stream.statistics.attaches}
        return result


async def serve(device: Device) -> None:
    """Answer the requests that arrive on stdin, one per line, all at the same time."""
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps({"ready": True}), flush=True)
    running: set[asyncio.Task[None]] = set()

    async def one(request: dict[str, Any]) -> None:
        number = request.pop("id")
        print(json.dumps({"id": number} | await device.answer(request)), flush=True)

    async for line in lines:
        task = asyncio.create_task(one(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def run(options: dict[str, Any]) -> None:
    """Serve until the input ends. options: as `Device.start` of benchmarks.chaos.sessions gives them."""
    async with AsyncClient(
        coordinator=options["coordinator"],
        api_key=options["api_key"],
        reroute=options["reroute"],
        tls=ClientTls(Path(options["ca"])),
        cache_dir=options["cache"],
        draft=options["draft"],
    ) as client:
        await serve(Device(client))


def main() -> None:
    options = json.loads(sys.argv[1])
    with Path(options["log"]).open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    configure("json", "device")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
