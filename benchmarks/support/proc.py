"""Read what /proc says about processes, and run worker processes that answer requests in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import old_harness as harness
from outrider.core.errors import Unavailable

MOST_BUSY = 0.9
"""Share of the time for which the clients' core may be busy, whatever runs there, before it may limit a figure."""
_LINE_BYTES = 1 << 24


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process with all its threads; 0 if it is gone."""
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def busy_seconds(core: int) -> float:
    """Return the seconds since the machine's start for which a CPU was not idle, whatever ran there."""
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    user, nice, system, _idle, _iowait, *others = next(map(int, line[1:9]) for line in lines if line[0] == f"cpu{core}")
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def children(pid: int) -> list[int]:
    """Return the processes that this one started and that still run."""
    return _children_by_parent().get(pid, [])


def family(pid: int) -> list[int]:
    """Return the process and all that descend from it."""
    by_parent = _children_by_parent()
    found, queue = [pid], [pid]
    while queue:
        below = by_parent.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _children_by_parent() -> dict[int, list[int]]:
    by_parent: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                by_parent.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    return by_parent


def _stat(pid: int) -> list[str]:
    return stat_fields(Path("/proc", str(pid), "stat").read_text())


def stat_fields(line: str) -> list[str]:
    """Return the fields of a line of /proc/PID/stat from the state on: the name before them may hold anything."""
    return line.rpartition(")")[2].split()


class JsonWorker:
    """Run a process that reads requests from stdin and answers them on stdout, each a line of JSON with an `id`.

    Its first line says that it is ready. Any number of requests may be pending.
    """

    def __init__(self, process: asyncio.subprocess.Process, ready: Mapping[str, Any]) -> None:
        self.ready = ready
        """The first line."""
        self._process = process
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._requests = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        cores: Sequence[int] = (),
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> JsonWorker:
        """Run `python -m module` on these cores, on all if empty. Raises Unavailable if it ends before it is ready.

        python: another interpreter than this one. environment: variables beside those of this process.
        """
        pin = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        process = await asyncio.create_subprocess_exec(
            *pin,
            *(str(python or sys.executable), "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            cwd=harness.ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        first = b"" if process.stdout is None else await process.stdout.readline()
        if not first:
            await process.wait()
            raise Unavailable(f"{module} ended before it was ready; its errors stand above")
        return cls(process, json.loads(first))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Return whether the process has closed its output."""
        return self._reading.done()

    @property
    def pending(self) -> int:
        """Return the number of requests that have no answer yet."""
        return len(self._pending)

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer. Raises Unavailable if the process ends before it."""
        if self._process.stdin is None or self.ended:
            raise Unavailable("a worker process has ended; its errors stand above")
        self._requests += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[self._requests] = answer
        self._process.stdin.write(json.dumps({"id": self._requests} | request).encode() + b"\n")
        return await answer

    async def kill(self) -> None:
        """Send SIGKILL; pending requests fail."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        while self._process.stdout is not None and (line := await self._process.stdout.readline()):
            data = json.loads(line)
            answer = self._pending.pop(data.pop("id"))
            if not answer.done():  # nobody may be waiting any more
                answer.set_result(data)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(Unavailable("the worker process has ended"))
        self._pending.clear()
