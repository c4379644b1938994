"""Run `outrider-edge serve` in front of the cluster, and measure what its requests hold there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from system import ROOT, System

from outrider.wire.v1 import coordinator_pb2 as pb

NOTHING = [(0, 0), (0, 0)]
"""No session and no slot on either of two verifiers."""


@contextlib.asynccontextmanager
async def server(system: System, folder: Path, *flags: str, **environment: str) -> AsyncIterator[tuple[str, int]]:
    """Yield (URL, process id) of a running server."""
    command = ("-m", "edge_agent.cli", "serve", "--coordinator", system.cluster.address, "--listen", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--cache-dir", str(folder / "cache"), *flags),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        found = re.search(r"http://\S+/", line)
        assert found, line
        yield found[0], process.pid
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def ready_server(system: System, folder: Path) -> AsyncIterator[str]:
    """Yield the URL of a server that has loaded target and draft."""
    async with server(system, folder) as (address, _):
        async with httpx.AsyncClient(base_url=address) as web:
            for _ in range(200):
                if (await web.get("ready")).status_code == 200:
                    break
                await asyncio.sleep(0.1)
        yield address


async def taken(system: System) -> list[tuple[int, int]]:
    """Return live sessions and KV slots of each verifier once none is in use, or at the end of the wait."""

    def free(status: pb.StatusResponse) -> bool:
        return not any(v.telemetry.live_sessions or v.telemetry.kv_used for v in status.verifiers)

    with contextlib.suppress(TimeoutError, AssertionError):
        await system.until_status(free)
    return [(v.telemetry.live_sessions, v.telemetry.kv_used) for v in (await system.status()).verifiers]


async def until_live(system: System, count: int) -> None:
    await system.until_status(lambda status: sum(v.telemetry.live_sessions for v in status.verifiers) >= count)
