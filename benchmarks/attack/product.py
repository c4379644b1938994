"""Start the processes of the product from one checkout, this one or another, and speak its version of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import harness, proc
from benchmarks.support.draft_replay.client import ServiceAddress
from benchmarks.support.malicious_client import RawStream
from coordinator.cluster import Child
from outrider.processes import tied_to_this_process
from outrider.wire.v1 import session_pb2 as pb

DEVICE = Path(__file__).with_name("device.py")
TICKETS_IN_METADATA = "outrider/wire/admission.py"
"""File that a checkout has since tickets travel in a call's metadata; before, they were a field of Open."""

ASKED_FOR = {"OUTRIDER_VERIFIER_PADDING": "buckets", "OUTRIDER_EDGE_PADDING": "buckets"}
"""Settings that everything on more than one machine has by default. Checkouts without them ignore them."""

NICE = 15
"""Niceness of programs that are run to their end: they stand for other machines than the neighbour's, and leave it the
core that they share."""


@dataclass(frozen=True)
class Ended:
    """Say how a program ended."""

    code: int | None
    """Exit code, negative for a signal; None if it had to be killed when its time was over."""
    output: str
    seconds: float
    peak_mb: float
    """Greatest resident memory of the program with all its children."""


class Product:
    """Hold a checkout of the product. Its programs find nothing of another checkout."""

    def __init__(self, code: Path) -> None:
        self.code = code.resolve()
        self._in_metadata = (self.code / TICKETS_IN_METADATA).is_file()

    def python(self, *arguments: str, **variables: str) -> list[str]:
        """Return the command of a Python program of the checkout. variables: of its environment."""
        given = {"PYTHONPATH": str(self.code), "PYTHONSAFEPATH": "1", **ASKED_FOR, **variables}
        return ["env", *(f"{name}={value}" for name, value in given.items()), sys.executable, *arguments]

    async def start(self, name: str, *arguments: str, logs: Path, core: int, **variables: str) -> Child:
        """Start a program that prints where it listens, and wait for that. Raises Unavailable or BadRequest."""
        log = logs / f"{name}.log"
        return await Child.start(name, self.python("-m", *arguments, **variables), log=log, cores=[core])

    @contextlib.asynccontextmanager
    async def device(self, task: str, core: int, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a task of device.py, which prints lines of JSON; it is killed at the end."""
        process = await asyncio.create_subprocess_exec(
            *tied_to_this_process(),
            *self._device_command(task, core, options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 24,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _kill_group(process.pid)
            await process.wait()

    async def run_device(
        self, task: str, core: int, timeout_s: float, *, variables: Mapping[str, str] | None = None, **options: Any
    ) -> Ended:
        """Run a task of device.py to its end. variables: of its environment."""
        return await self.run(self._device_command(task, core, options, **(variables or {})), timeout_s)

    async def run(
        self, command: Sequence[str], timeout_s: float, *, most_mb: float = 3_000.0, until: bytes | None = None
    ) -> Ended:
        """Run a command to its end. Kill it with its children after a time, when they take too much memory, or when it
        has printed `until`."""
        loop = asyncio.get_running_loop()
        began, peak = loop.time(), 0.0
        process = await asyncio.create_subprocess_exec(
            *tied_to_this_process(nice=NICE),
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        output = bytearray()
        reading = asyncio.create_task(_read(process, output))
        try:
            while process.returncode is None and loop.time() - began < timeout_s and peak < most_mb:
                peak = max(peak, sum(map(proc.rss_mb, proc.family(process.pid))))
                if until is not None and until in output:
                    break
                await asyncio.sleep(0.1)
            code, seconds = process.returncode, loop.time() - began
        finally:
            _kill_group(process.pid)
            await process.wait()
        await reading
        return Ended(code, output.decode(errors="replace"), seconds, peak)

    def stream(self, verifier: str, session_id: str, ticket: bytes = b"", epoch: int = 1) -> RawStream:
        """Return a stream to a verifier with this ticket, as the checkout's protocol has it."""
        raw = (RawStream if self._in_metadata else _TicketInOpen)(ServiceAddress(verifier))
        raw.session_id, raw.ticket, raw.epoch = session_id, ticket, epoch
        return raw

    def _device_command(self, task: str, core: int, options: dict[str, Any], **variables: str) -> list[str]:
        command = self.python("-P", str(DEVICE), task, json.dumps(options), **variables)
        return ["taskset", "--cpu-list", str(core), *command]


class _TicketInOpen(RawStream):
    """Open a stream as it was before tickets travelled in metadata: fields 1 to 3 of Open are id, ticket and attach."""

    async def send(self, **kind: Any) -> None:
        message = pb.ClientMessage(**kind)
        if message.WhichOneof("kind") != "open":
            await self.call.write(message.SerializeToString())
            return
        opening = message.open
        fields = (opening.session_id.encode(), self.ticket, opening.attach.SerializeToString())
        body = b"".join(_field(number, value) for number, value in enumerate(fields, start=1))
        await self.call.write(_field(2, body))


def checkout() -> Product:
    """Return the product of this checkout."""
    return Product(harness.ROOT)


def _field(number: int, value: bytes) -> bytes:
    """Return a field of a protobuf message, of bytes."""
    length, size = bytearray(), len(value)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes(length) + bytes([size]) + value


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def _read(process: asyncio.subprocess.Process, output: bytearray) -> None:
    while process.stdout is not None and (data := await process.stdout.read(1 << 16)):
        output += data
