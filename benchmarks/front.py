"""Measure what the front of a verifier costs for each session and step: an Append in, and a Commit out.

The front is the product's own process. Behind it an engine without a target commits three tokens for each session every
40 ms, over the product's protocol; before it are light devices, each with a connection of its own, which answer every
Commit with an Append of six nodes, padded and with a checksum, as devices on another machine do. The front has one
core, also if it has several processes, and engine and devices have another.

cpu_us_per_session_step: CPU time of the front's processes, kernel time and all threads included, by Commits that
reached devices, in the worst of the sizes. added_ms_p99: by number of sessions, the 99th percentile of the time that a
message is on its way through the front, in the worse of two directions: from when the engine begins to send a step to
the device's receipt of its Commit, and from when a device builds an Append to the engine's receipt.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.support import harness, proc
from benchmarks.support.front_load import engine
from benchmarks.support.front_load.shared_times import SharedTimes, quantile_ms
from benchmarks.support.harness import Criterion, Pair, Size
from outrider.core.errors import Unavailable

GOAL_US = 120.0
SETTLE_S = 2.0


@dataclass(frozen=True)
class Load:
    """Says what one number of sessions cost."""

    sessions: int
    cpu_us: float
    """CPU time of the front for a session and step."""
    cores: float
    """CPU time of the front by time."""
    steps_per_s: float
    """Commits that a session got, a second: 25 if nothing is held up."""
    down_ms: tuple[float, float]
    """Median and 99th percentile from the engine to the device."""
    up_ms: tuple[float, float]
    """The same from the device to the engine."""
    lost: int
    """Sessions that ended."""
    load_cores: tuple[float, float]
    """CPU time of the devices and of the engine by time, which share a core: near 1 together, they are what is slow."""

    def __str__(self) -> str:
        return (
            f"{self.sessions:5} sessions: {self.cpu_us:6.1f} us of the front a session and step, {self.cores:.2f} cores"
            f"; {self.steps_per_s:.1f} steps/s a session; down {self.down_ms[0]:.1f} ms, p99 {self.down_ms[1]:.1f};"
            f" up {self.up_ms[0]:.1f} ms, p99 {self.up_ms[1]:.1f}; devices {self.load_cores[0]:.2f} and"
            f" engine {self.load_cores[1]:.2f} cores, {self.lost} ended"
        )


@asynccontextmanager
async def verifier(
    pair: Pair, times: Path, cores: Sequence[int], engine_core: int, processes: int = 1
) -> AsyncIterator[tuple[int, str]]:
    """Run a verifier whose front has these cores and so many processes; yield its process id and its address."""
    environment = os.environ | {engine.CORES: str(engine_core), engine.TIMES: str(times)}
    module = ("-m", "benchmarks.support.front_load.verifier", "--model", str(pair.target), "--max-sessions", "4096")
    counted = ("--front-processes", str(processes))
    process = await asyncio.create_subprocess_exec(
        *("taskset", "--cpu-list", ",".join(map(str, cores)), sys.executable, *module, *counted),
        stdout=asyncio.subprocess.PIPE,
        cwd=harness.ROOT,
        env=environment,
    )
    try:
        line = b"" if process.stdout is None else await process.stdout.readline()
        found = re.search(r"listening on (\S+)", line.decode())
        if found is None:
            raise Unavailable(f"the verifier did not start: {line!r}")
        yield process.pid, found[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def measure(devices: proc.JsonWorker, front: int, times: SharedTimes, sessions: int, seconds: float) -> Load:
    """Measure the front with so many sessions."""
    await devices.ask(open=sessions)
    await devices.ask(seconds=SETTLE_S)
    appends, used = times.appends(), _cpu_s(front)
    counted = await devices.ask(seconds=seconds)
    cpu_s, engine_s = (after - before for after, before in zip(_cpu_s(front), used, strict=True))
    up, down = times.appends() - appends, np.array(counted["down"])
    commits = max(1, counted["commits"])
    return Load(
        sessions,
        1e6 * cpu_s / commits,
        cpu_s / seconds,
        counted["commits"] / seconds / sessions,
        (quantile_ms(down, 0.5), quantile_ms(down, 0.99)),
        (quantile_ms(up, 0.5), quantile_ms(up, 0.99)),
        counted["ended"],
        (counted["cpu_share"], engine_s / seconds),
    )


def _cpu_s(front: int) -> tuple[float, float]:
    """Return the CPU seconds of the front's processes together, and of the engine."""
    by_engine = {
        pid: engine.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in proc.family(front)
    }
    seconds = [sum(proc.cpu_seconds(pid) for pid, one in by_engine.items() if one is which) for which in (False, True)]
    return seconds[0], seconds[1]


async def run(pair: Pair, size: Size, processes: int = 1) -> list[Load]:
    seconds = size.pick(smoke=0.5, quick=2.0, full=30.0)
    numbers = size.pick(smoke=(2, 4), quick=(16, 64), full=(64, 256, 512))
    front_core, other_core = harness.cores()
    harness.pin(other_core)
    loads = []
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        file = Path(scratch, "times")
        times = SharedTimes(file)
        async with verifier(pair, file, [front_core], other_core, processes) as (front, address):
            module = "benchmarks.support.front_load.devices"
            devices = await proc.JsonWorker.start(module, address, str(file), cores=[other_core])
            try:
                for sessions in numbers:
                    loads.append(await measure(devices, front, times, sessions, seconds))
                    print(loads[-1], flush=True)
            finally:
                await devices.kill()
    return loads


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("front", __doc__)
    parser.add_argument("--front-processes", type=int, default=1, help="processes of the front, on one core together")
    options = parser.parse_args(argv)
    loads = await run(Pair.in_folder(options.models), options.size, options.front_processes)
    worst_us = max(load.cpu_us for load in loads)
    harness.finish(
        {
            "cpu_us_per_session_step": round(worst_us, 1),
            "added_ms_p99": {str(load.sessions): round(max(load.down_ms[1], load.up_ms[1]), 2) for load in loads},
        },
        [
            Criterion.bound("CPU time of the front for a session and step, us", worst_us, at_most=GOAL_US),
            Criterion.none("sessions that ended", sum(load.lost for load in loads)),
        ],
        options.size,
    )


if __name__ == "__main__":
    asyncio.run(main())
