"""Control the devices of the distillation benchmark: send them orders and collect their answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.distill.answer import DeviceAnswer
from benchmarks.distill.devices import DevicePlan
from outrider.core.errors import Unavailable
from outrider.processes import tied_to_this_process

DEVICES = 8
PROCESSES = 2
_LINE = 1 << 20
_END_S = 20.0


async def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition. Raises Unavailable if it is not met within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 (files and processes send no event)
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise Unavailable(f"not within {seconds:.0f} s: {what}") from None


class DeviceFleet:
    """Run the processes of devices. Use it as an async context manager; they end when it is left."""

    def __init__(self, plans: Sequence[DevicePlan], logs: Path) -> None:
        self.answers: list[DeviceAnswer] = []
        self._plans = plans
        self._logs = logs
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []

    @classmethod
    def of(
        cls,
        coordinator: str,
        cache: Path,
        keys: str,
        tokens: int,
        logs: Path,
        *,
        devices: int = DEVICES,
        processes: int = PROCESSES,
    ) -> Self:
        """Return a fleet whose devices are spread over the processes. tokens: length of each request."""
        shares = [list(range(first, devices, processes)) for first in range(processes)]
        return cls([DevicePlan(coordinator, str(cache), keys, share, tokens) for share in shares], logs)

    async def __aenter__(self) -> Self:
        for number, plan in enumerate(self._plans):
            with (self._logs / f"devices-{number}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *tied_to_this_process(),
                    *(
                        sys.executable,
                        "-X",
                        "faulthandler",
                        "-m",
                        "benchmarks.distill.devices",
                        json.dumps(asdict(plan)),
                    ),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=_LINE,
                )
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(process)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        await asyncio.gather(*(self._ended(process) for process in self._processes))
        await asyncio.gather(*self._readers)

    def order(self, kind: str, pause_s: float = 0.0) -> None:
        """Order what devices ask from the next request on; with an empty kind they ask nothing."""
        line = json.dumps({"kind": kind, "pause_s": pause_s}) + "\n"
        for process in self._processes:
            if process.returncode is not None or process.stdin is None:
                raise Unavailable("a process of devices has ended; see its log")
            process.stdin.write(line.encode())

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def using(self) -> dict[int, str]:
        """Return the release in use by each device at the end of its last request."""
        return {answer.device: answer.release for answer in self.answers if answer.release}

    async def quiet(self, seconds: float = 60.0) -> None:
        """Send no more requests, and wait for those under way."""
        self.order("")
        count = -1
        async with asyncio.timeout(seconds):
            while count != len(self.answers):
                count = len(self.answers)
                await asyncio.sleep(3.0)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None:
            async for line in process.stdout:
                self.answers.append(DeviceAnswer.of_line(line))
        if status := await process.wait():
            print(f"a process of devices ended with {status}; see its log", flush=True)

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
