"""Run the SDK's sessions in device processes behind links that can be broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.links import Balancer, FaultyProxy
from benchmarks.support.network_link import Link
from benchmarks.support.proc import JsonWorker
from outrider.core.errors import Unavailable

WAN = Link(rtt_ms=40.0, jitter_ms=10.0)
"""The link between a device and everything else, while nothing is wrong."""
TIMEOUT_S = 60.0
"""Time that the caller of a session allows."""
STUCK_S = TIMEOUT_S + 15.0
"""Time after which a session that has not ended counts as stuck."""


@dataclass(frozen=True)
class SessionRequest:
    """A prompt with its parameters, whose undisturbed output is known."""

    name: str
    prompt: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class SessionOutcome:
    """Tells how a session went. Times are on the monotonic clock, which all processes of a machine share."""

    request: SessionRequest
    device: int
    began: float
    ended: float
    tokens: tuple[int, ...] = ()
    error: str = ""
    """Class of the error; "killed" where its device was killed, "stuck" where it did not end."""
    message: str = ""
    typed: bool = True
    session: str = ""
    attaches: int = 0
    waits: tuple[tuple[float, float], ...] = ()
    """Begin and end of each notable wait for tokens."""


class Device:
    """A device's process, and its links to the verifiers and coordinators."""

    def __init__(self, number: int, cluster: ChaosCluster, scratch: Path, draft: str | None) -> None:
        self.number = number
        self.name = f"device-{number}"
        self.clock = scratch / f"{self.name}.clock"
        self.log = scratch / f"{self.name}.log"
        self._cluster = cluster
        self._cache = scratch / f"{self.name}-cache"
        self._draft = draft
        self.links = {
            server.name: FaultyProxy(server.address, link=WAN, seed=100 * number + index)
            for index, server in enumerate(cluster.verifiers)
        }
        self.front = Balancer([s.address for s in cluster.coordinators], cluster.healthy, link=WAN, seed=number)
        self.worker: JsonWorker | None = None
        self.up = asyncio.Event()

    @property
    def ways(self) -> list[FaultyProxy]:
        """Return all links of the device."""
        return [*self.links.values(), self.front]

    async def start(self, *, without_disk: bool = False) -> None:
        """Start the process. without_disk: it has no cache, and cannot write a byte to any file."""
        verifiers = self._cluster.verifiers
        cache = self._cache
        if without_disk:
            cache = cache.with_name(f"{self.name}-empty")
            shutil.rmtree(cache, ignore_errors=True)
        options = {
            "coordinator": self.front.address,
            "api_key": self._cluster.keys[self.number],
            "reroute": {server.address: self.links[server.name].address for server in verifiers},
            "ca": str(self._cluster.ca),
            "cache": str(cache),
            "draft": self._draft,
            "log": str(self.log),
        }
        path = os.pathsep.join(filter(None, (str(Path(__file__).with_name("clock")), os.environ.get("PYTHONPATH"))))
        environment = {"CHAOS_CLOCK": str(self.clock), "PYTHONPATH": path}
        self.worker = await JsonWorker.start("benchmarks.chaos.device", json.dumps(options), environment=environment)
        if without_disk:
            limit_files(self.worker.pid, 0)
        self.up.set()

    async def kill(self) -> None:
        """Kill the process with its sessions."""
        self.up.clear()
        if self.worker is not None:
            await self.worker.kill()

    async def run(self, request: SessionRequest) -> SessionOutcome:
        """Run one session to its end."""
        await self.up.wait()
        began = time.monotonic()
        worker = self.worker
        if worker is None:
            raise RuntimeError("the device has no process")
        try:
            async with asyncio.timeout(STUCK_S):
                found = await worker.ask(prompt=request.prompt, options=request.options)
        except Unavailable:
            return SessionOutcome(request, self.number, began, time.monotonic(), error="killed")
        except TimeoutError:
            return SessionOutcome(request, self.number, began, time.monotonic(), error="stuck")
        found |= {"tokens": tuple(found["tokens"]), "waits": tuple((a, b) for a, b in found["waits"])}
        return SessionOutcome(request, self.number, began, time.monotonic(), **found)


def limit_files(pid: int, size: int | None) -> None:
    """Let a process write no file beyond `size` bytes, as if the disk were full; None lifts that again."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@dataclass
class Load:
    """Keeps sessions going on all devices, each slot one after another, and collects how they end."""

    devices: Sequence[Device]
    requests: Sequence[SessionRequest]
    per_device: int
    outcomes: list[SessionOutcome] = field(default_factory=list)
    _over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin, again after `end` too."""
        self._over = False
        slots = [(device, slot) for device in self.devices for slot in range(self.per_device)]
        self._tasks = [asyncio.create_task(self._repeat(device, turn)) for turn, (device, _) in enumerate(slots)]

    async def _repeat(self, device: Device, turn: int) -> None:
        await asyncio.sleep(0.3 * turn)
        while not self._over:
            outcome = await device.run(self.requests[turn % len(self.requests)])
            self.outcomes.append(outcome)
            turn += 1
            if outcome.error:
                await asyncio.sleep(0.5)

    async def end(self) -> None:
        """Let the running sessions end, and begin no more."""
        self._over = True
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raise what has ended a slot: then nothing is tested any more."""
        for task in self._tasks:
            if task.done():
                task.result()
