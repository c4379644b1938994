"""Run the whole system as child processes, and a device in another one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from coordinator.cluster import Child, Cluster
from outrider.wire.channels import ClientTls, channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
DRAIN_S = 0.4
"""Time that sessions go on at a draining verifier of the system `hasty`."""
QUICK = ("--token-budget", "64")
"""Flags with which a verifier starts sooner: it measures steps of fewer rows."""


class Failed(Exception):
    """Report a request that the device could not finish; `kind` is the error's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Running:
    """Follow a request that a device runs, by what it has reported so far."""

    id: int
    _device: Device
    tokens: list[int]
    attaches: list[str]
    times: list[float]
    _inbox: asyncio.Queue[dict[str, Any]]
    _done: dict[str, Any] | None = None

    @property
    def places(self) -> list[str]:
        """Return the verifiers in the order in which the session was there.

        Where gRPC loses the status of a call that ends while a message is sent (grpc issue 36066), the device attaches
        once more to the same one, and is told there.
        """
        return [address for address, _ in itertools.groupby(self.attaches)]

    async def until_tokens(self, count: int) -> None:
        """Wait until at least so many tokens have arrived."""
        while len(self.tokens) < count:
            assert await self._next(), f"ended with {len(self.tokens)} tokens, before {count}"

    async def until_attached(self) -> None:
        """Wait for the first attach."""
        while not self.attaches:
            assert await self._next(), "ended before it was attached"

    async def until_attaches(self, count: int) -> None:
        """Wait for the first token after the attach number `count`."""
        while len(self.attaches) < count:
            assert await self._next(), f"ended after {len(self.attaches)} attaches, before {count}"
        before = len(self.tokens)
        await self.until_tokens(before + 1)

    async def done(self) -> dict[str, Any]:
        """Return the whole result of the request. Raises Failed."""
        while await self._next():
            pass
        assert self._done is not None
        return self._done

    async def cancel(self) -> None:
        await self._device.send(id=self.id, do="cancel")

    async def _next(self) -> bool:
        if self._done is not None:
            return False
        async with asyncio.timeout(60):
            message = await self._inbox.get()
        if "error" in message:
            raise Failed(message["error"], message["message"])
        self.attaches += [message["attach"]] if "attach" in message else []
        self._done = message.get("done")
        if "tokens" in message:
            self.tokens += message["tokens"]
            self.times += [message["at"]] * len(message["tokens"])
        return self._done is None


class Device:
    """Run device.py as a process, and send it requests."""

    def __init__(self, process: asyncio.subprocess.Process, cache: Path) -> None:
        self.process = process
        self._cache = cache
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, cache: Path) -> AsyncIterator[Device]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("device.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            limit=1 << 24,
        )
        device = cls(process, cache)
        try:
            yield device
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await device._reading

    async def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        await self.process.stdin.drain()

    async def begin(self, where: dict[str, Any], prompt: Any, *, do: str = "generate", **options: Any) -> Running:
        """Begin a request; `where` holds AsyncClient's arguments."""
        number = next(self._numbers)
        self._inboxes[number] = asyncio.Queue()
        client = {"cache_dir": str(self._cache), **where}
        await self.send(id=number, do=do, client=client, prompt=prompt, options=options)
        return Running(number, self, [], [], [], self._inboxes[number])

    async def run(self, where: dict[str, Any], prompt: Any, **options: Any) -> dict[str, Any]:
        return await (await self.begin(where, prompt, **options)).done()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = json.loads(line)
            self._inboxes[message["id"]].put_nowait(message)


class System:
    """Run a coordinator and its verifiers; killed ones are replaced. Use it as an async context manager.

    flags: of its verifiers. count: number of verifiers. placing: flags of its coordinator.
    """

    running: ClassVar[list[System]] = []

    def __init__(
        self, folder: Path, pair: tuple[Path, Path], *flags: str, count: int = 2, placing: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.count = count
        self._placing = placing
        self._verifier = ("--model", str(pair[0]), "--draft", str(pair[1]), *QUICK, *flags)
        self.cluster = Cluster(logs=folder / "logs")
        self._replacing: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        await self.cluster.__aenter__()
        self.running.append(self)
        try:
            await self._start_coordinator("127.0.0.1:0")
            await asyncio.gather(*(self.start_verifier() for _ in range(self.count)))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        self.running.remove(self)
        self.signal(signal.SIGCONT)
        await self.cluster.__aexit__(kind, error, trace)

    def signal(self, signum: int) -> None:
        """Send a signal to all processes of the cluster."""
        for child in [*self.cluster.verifiers, self.cluster.coordinator]:
            if child is not None:
                child.signal_group(signum)

    @property
    def here(self) -> dict[str, Any]:
        """Return the arguments with which a device connects."""
        return {"coordinator": self.cluster.address}

    @property
    def coordinator(self) -> Child:
        assert self.cluster.coordinator is not None
        return self.cluster.coordinator

    def verifier_at(self, address: str) -> Child:
        return next(child for child in self.cluster.verifiers if child.address == address and child.running)

    async def restart_coordinator(self) -> None:
        """Start a killed coordinator again at the same address, with the same key and an empty store."""
        await self._start_coordinator(self.coordinator.address)

    async def start_verifier(self, *flags: str) -> Child:
        return await self.cluster.start_verifier(*self._verifier, *flags)

    def replace_in_background(self) -> None:
        """Start a new verifier for one that is gone; `settled` waits for it."""
        self._replacing = asyncio.create_task(self.start_verifier())

    async def settled(self) -> None:
        """Wait until all verifiers run, are registered and hold nothing."""
        if self._replacing is not None:
            task, self._replacing = self._replacing, None
            await task
        alive = [child for child in self.cluster.verifiers if child.running]
        self.cluster.verifiers[:] = alive
        while len(self.cluster.verifiers) < self.count:
            await self.start_verifier()
        wanted = {child.address for child in self.cluster.verifiers}

        def at_rest(status: pb.StatusResponse) -> bool:
            registered = {verifier.address for verifier in status.verifiers}
            loads = [verifier.telemetry for verifier in status.verifiers]
            return registered == wanted and not any(load.kv_used or load.live_sessions for load in loads)

        await self.until_status(at_rest)

    async def status(self) -> pb.StatusResponse:
        return await status_of(self.cluster.address)

    async def until_status(self, condition: Callable[[pb.StatusResponse], object], timeout_s: float = 30.0) -> None:
        give_up = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(Exception):
                if condition(await self.status()):
                    return
            assert time.monotonic() < give_up, await self.status()
            await asyncio.sleep(0.05)

    async def _start_coordinator(self, listen: str) -> None:
        state = str(self.folder / "state")
        # Reports are frequent, so that what a test waits to see is seen soon.
        flags = ("--listen", listen, "--state-dir", state, "--report-interval-ms", "100", *self._placing)
        await self.cluster.start_coordinator(*flags)


async def status_of(address: str, ca: Path | None = None) -> pb.StatusResponse:
    async with channel(address, tls=ClientTls(ca) if ca else None) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        status: pb.StatusResponse = await admin.Status(pb.StatusRequest(), timeout=3.0)
        return status


def children_of(pid: int) -> list[int]:
    """Return the process ids of all live descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)
