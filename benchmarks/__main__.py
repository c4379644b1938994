"""List the benchmarks, or run several of them, each as a process of its own, and keep their results.

    python -m benchmarks                      list all, with what they take
    python -m benchmarks all --quick          run all of them for a few seconds or minutes each
    python -m benchmarks all                  run all of them in full: a night
    python -m benchmarks latency capacity     run some

Full runs come one after another. Short ones come two at a time, since their figures mean nothing, and compute with one
thread where their own program does not say otherwise: threads of two runs would wait for each other in busy loops.

A run is left out if there is a result of the same command and of the committed code, as far as the benchmark measures
it. So the same command goes on where it was stopped, and later runs only what has changed since; `--again` runs all.
Results of full runs are in benchmarks/results, others in benchmarks/out, which git ignores, as is all that benchmarks
print. The exit status is 1 if one of the runs failed, now or before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks import results
from benchmarks.catalogue import BENCHMARKS, PREVIOUS, SUITE, VLLM_PYTHON, Benchmark
from benchmarks.results import NOT_MET, Result
from outrider.processes import tied_to_this_process

OUT = results.ROOT / "benchmarks" / "out"
HANG_S, HANG_TIMES = 3_600.0, 10.0
"""A run that takes an hour, and ten times what it takes on an idle machine besides, hangs. No figure depends on it."""
STOP_S = 60.0
"""Time that a run has to end its processes, before it is killed."""
FULL = "full"
SHORT_AT_ONCE = 2
"""Short runs at a time."""
VLLM_VARIABLE = "OUTRIDER_VLLM_PYTHON"


@dataclass(frozen=True)
class Ended:
    """Say how the run of one benchmark ended. status: its exit status; None if it was left out."""

    name: str
    outcome: str
    status: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.name:16}{'' if self.seconds is None else f'{self.seconds:,.0f} s':>10}   {self.outcome}"


@dataclass(frozen=True)
class Runner:
    """Run benchmarks of one size. given: what some of them need, by the option."""

    size: str
    folder: Path
    given: dict[str, Path]
    again: bool = False

    async def run(self, benchmark: Benchmark) -> Ended:
        """Run a benchmark unless there is a result of this code already, and keep its result."""
        if benchmark.needs is not None and benchmark.needs not in self.given:
            return Ended(benchmark.name, f"left out: give {benchmark.needs} PATH")
        command, published = self.command(benchmark), self.published(benchmark)
        found = None if self.again else results.read(benchmark.name, self.folder)
        if found is not None and _still_true(found, benchmark, published):
            return Ended(benchmark.name, f"{_outcome(found.status)}, on {found.date}", found.status, found.seconds)
        commit, uncommitted = results.commit()
        date, began = datetime.datetime.now(datetime.UTC).date(), time.monotonic()
        expected_s = benchmark.full_s if self.size == FULL else benchmark.quick_s
        logs = OUT / self.size
        logs.mkdir(parents=True, exist_ok=True)
        print(f"{benchmark.name}: python {' '.join(command)}; takes about {expected_s} s, see {logs}", flush=True)
        with (logs / f"{benchmark.name}.log").open("wb") as log, (logs / f"{benchmark.name}.err").open("wb") as errors:
            status = await _process(command, log, errors, HANG_S + HANG_TIMES * expected_s, self.environment)
        seconds = round(time.monotonic() - began, 1)
        last = last_line(logs / f"{benchmark.name}.log")
        beside_vllm = VLLM_PYTHON in (benchmark.needs, benchmark.uses)
        if status is None:
            return Ended(benchmark.name, f"STOPPED: it hangs, see {logs}", 1, seconds)
        if last is None:
            return Ended(benchmark.name, f"FAILED without a result, see {logs}", status or 1, seconds)
        if not status and all(figure is None for figure in last.values()):
            return Ended(benchmark.name, "left out: this machine has nothing to measure it on", 0, seconds)
        Result(
            name=benchmark.name,
            command=published,
            commit=commit,
            uncommitted=uncommitted,
            date=date,
            machine=results.machine(),
            versions=results.versions(self.given.get(VLLM_PYTHON) if beside_vllm else None),
            status=status,
            seconds=seconds,
            not_met=not_met(logs / f"{benchmark.name}.log"),
            last=last,
        ).write(self.folder)
        return Ended(benchmark.name, _outcome(status), status, seconds)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a run, without what its command tells; a short run has one thread for each pool."""
        threads = {} if self.size == FULL else {"OMP_NUM_THREADS": "1"}
        return {name: value for name, value in os.environ.items() if name != VLLM_VARIABLE} | threads

    def command(self, benchmark: Benchmark) -> tuple[str, ...]:
        """Return the arguments of `python` that run a benchmark."""
        size = () if self.size == FULL else (f"--{self.size}",)
        needs: tuple[str, ...] = ()
        if benchmark.needs is not None:
            option = "--engine-python" if "--engine" in benchmark.arguments else benchmark.needs
            needs = (option, str(self.given[benchmark.needs]))
        elif benchmark.uses in self.given:
            needs = (benchmark.uses, str(self.given[benchmark.uses]))
        return ("-m", f"benchmarks.{benchmark.program}", *benchmark.arguments, *needs, *size)

    def published(self, benchmark: Benchmark) -> tuple[str, ...]:
        """Return the same without what the machine calls a folder outside the checkout."""
        named = {str(path): _named(path) for path in self.given.values()}
        return tuple(named.get(argument, argument) for argument in self.command(benchmark))


def _named(path: Path) -> str:
    return str(path.relative_to(results.ROOT)) if path.is_relative_to(results.ROOT) else "PATH"


def _outcome(status: int | None) -> str:
    return "ok" if not status else f"FAILED with status {status}"


def _still_true(found: Result, benchmark: Benchmark, command: Sequence[str]) -> bool:
    """Return whether a result is one of the same command and of the committed code."""
    same = found.source == "run" and not found.uncommitted and found.command == tuple(command)
    return same and results.changed_since(found.commit, benchmark.measures) is False


async def _process(
    command: Sequence[str], log: IO[bytes], errors: IO[bytes], limit_s: float, environment: Mapping[str, str]
) -> int | None:
    """Run `python` with these arguments from the root of the checkout; return its status, None if it was stopped."""
    process = await asyncio.create_subprocess_exec(
        *(*tied_to_this_process(), sys.executable, *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=errors,
        cwd=results.ROOT,
        start_new_session=True,
        env=environment,
    )
    try:
        return await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:  # it hangs, or somebody has pressed Ctrl-C
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def run_all(runner: Runner, chosen: Sequence[Benchmark]) -> list[Ended]:
    """Run these benchmarks, in their order, and print how each has ended."""
    places = asyncio.Semaphore(1 if runner.size == FULL else SHORT_AT_ONCE)

    async def run(benchmark: Benchmark) -> Ended:
        async with places:
            ended = await runner.run(benchmark)
        print(ended, flush=True)
        return ended

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(run(benchmark)) for benchmark in chosen]
    return [task.result() for task in running]


def last_line(log: Path) -> dict[str, Any] | None:
    """Return the JSON object that is the last line of a benchmark's output, None if it is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - results.MAX_BYTES))
        lines = file.read().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return last if isinstance(last, dict) and last else None


def not_met(log: Path) -> tuple[str, ...]:
    """Return the lines of a benchmark's output that name a goal which was not met, cut to what a result may hold."""
    lines = log.read_text(errors="replace").splitlines()
    return tuple(line.removesuffix(NOT_MET)[:200] for line in lines if line.endswith(NOT_MET))[:400]


def listing() -> str:
    """Return the table of all benchmarks; times are those of published runs where there are any."""
    rows = [("NAME", "QUICK", "FULL", "WHAT IT SHOWS", "WHAT IT MEASURES"), *map(_row, BENCHMARKS)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    usual = [benchmark for benchmark in BENCHMARKS if benchmark.needs is None]
    quick, full = sum(one.quick_s for one in usual) / SHORT_AT_ONCE / 60, sum(map(_full_s, usual)) / 3600
    return "\n".join(
        (*lines, "", f"Without those that need an option: {quick:.0f} minutes quick, {full:.1f} hours full.")
    )


def _row(benchmark: Benchmark) -> tuple[str, ...]:
    needs = f" (needs {benchmark.needs})" if benchmark.needs else ""
    quick, full = f"{benchmark.quick_s} s", f"{max(1, round(_full_s(benchmark) / 60))} min"
    return benchmark.name, quick, full, benchmark.shows + needs, " ".join(benchmark.areas)


def _full_s(benchmark: Benchmark) -> float:
    found = results.read(benchmark.name)
    return benchmark.full_s if found is None or not found.seconds else found.seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="`all`, or some by name; none to list them")
    sizes = parser.add_mutually_exclusive_group()
    for size in ("quick", "smoke"):
        sizes.add_argument(f"--{size}", dest="size", action="store_const", const=size, default=FULL)
    parser.add_argument("--folder", type=Path, help="folder of the results (default: see above)")
    parser.add_argument("--again", action="store_true", help="run also what has a result of this code")
    parser.add_argument(SUITE, type=Path, help="a checkout of JSON-Schema-Test-Suite, which `json_schema` needs")
    parser.add_argument(PREVIOUS, type=Path, help="a checkout of an earlier version, which `chaos` rolls back to")
    parser.add_argument(
        VLLM_PYTHON,
        type=Path,
        default=os.environ.get(VLLM_VARIABLE),
        help=f"interpreter with vLLM, which the runs on vLLM need (default: {VLLM_VARIABLE})",
    )
    options = parser.parse_args(argv)
    if not options.names:
        print(listing())
        return 0
    if unknown := {*options.names} - {"all", *(benchmark.name for benchmark in BENCHMARKS)}:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; `python -m benchmarks` lists them")
    chosen = [benchmark for benchmark in BENCHMARKS if "all" in options.names or benchmark.name in options.names]
    given = {SUITE: options.suite, VLLM_PYTHON: options.vllm_python, PREVIOUS: options.previous}
    runner = Runner(
        options.size,
        options.folder or (results.RESULTS if options.size == FULL else OUT / options.size),
        {name: path.absolute() for name, path in given.items() if path is not None},
        options.again,
    )
    try:
        ended = asyncio.run(run_all(runner, chosen))
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on with what is left")
        return 128 + signal.SIGINT
    print("", *ended, sep="\n")
    failed = [one.name for one in ended if one.status]
    print(f"{len(ended)} benchmarks, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
