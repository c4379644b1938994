"""Run a whole cluster as child processes on this machine: for `outrider up`, `outrider demo`, tests and benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from coordinator import START_TIMEOUT_S
from outrider.core.errors import BadRequest, Unavailable
from outrider.processes import tied_to_this_process
from outrider.settings import VARIABLE

STOP_TIMEOUT_S = 15.0
EXIT_REFUSED = 2
"""Exit code of a coordinator or verifier that refuses its settings or its files."""
MAX_LINE = 1 << 26
"""Bytes of a line that a child may write."""
_READY = "listening on "
_COORDINATOR = "OUTRIDER_COORDINATOR_"
_SETTINGS = ("OUTRIDER_EDGE_", _COORDINATOR, "OUTRIDER_VERIFIER_", VARIABLE)


def stand_apart(scratch: Path, *, prefix_cache: bool = True) -> None:
    """Make this process, and its children, forget settings for other clusters; devices get a cache in `scratch`.

    prefix_cache: False if the same prompts are timed more than once, so that each request pays for its own. Verifiers
    have no nodes of their own unless they are told to: what devices bring is to be measured.
    """
    for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
        del os.environ[name]
    os.environ["OUTRIDER_EDGE_CACHE_DIR"] = str(scratch / "cache")
    os.environ["OUTRIDER_VERIFIER_ENGINE_ARGS"] = json.dumps({"ngram": False, "prefix_cache": prefix_cache})


OnLog = Callable[[str, str], None]
"""Called with the name of a child and a line that it has written to stderr."""


class Child:
    """A process of the cluster, which leads its own process group."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name = name
        self.address = ""
        self._process = process
        self._log = log
        self._readers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        on_log: OnLog | None = None,
        cores: Sequence[int] = (),
        timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `command` and wait until it prints where it listens. Raises Unavailable with the end of its log, or
        BadRequest if it refuses its settings or its files.

        Its stderr goes to the file `log`, or line by line to `on_log`; it is inherited if both are None. cores: CPUs to
        pin it to, all if empty. environment: its variables, by default those of this process.
        """
        pin = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        with log.open("ab") if log else contextlib.nullcontext() as file:
            process = await asyncio.create_subprocess_exec(
                *tied_to_this_process(),
                *pin,
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE if on_log else file,
                start_new_session=True,
                env=environment,
                limit=MAX_LINE,
            )
        child = cls(name, process, log)
        if on_log is not None:
            child._readers.append(asyncio.create_task(child._read_log(on_log)))
        try:
            async with asyncio.timeout(timeout_s):
                await child._await_ready()
        except TimeoutError:
            await child.stop()
            raise Unavailable(
                f"{name} was not ready within {timeout_s:.0f} s; a large model may need a longer"
                f" --start-timeout-s{child._log_end()}"
            ) from None
        except BaseException:  # a caller that gives up waiting must not leave it running, nor its scratch
            await child.stop()
            raise
        child._readers.append(asyncio.create_task(child._drain()))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    def signal_group(self, signum: int) -> None:
        """Signal the process and its own children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

    async def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to what is left of the group."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        self.signal_group(signal.SIGKILL)
        await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def kill(self) -> None:
        """Send SIGKILL to the whole group, as when its machine stops."""
        self.signal_group(signal.SIGKILL)
        await self._process.wait()

    async def _await_ready(self) -> None:
        async for line in _lines(self._process.stdout):
            if line.startswith(_READY):
                self.address = line.removeprefix(_READY)
                return
        code = await self._process.wait()
        refused = BadRequest if code == EXIT_REFUSED else Unavailable
        raise refused(f"{self.name} ended with exit code {code} before it was ready{self._log_end()}")

    async def _drain(self) -> None:
        """Read stdout to its end, since a child that writes more must not block on a full pipe."""
        while self._process.stdout and await self._process.stdout.read(65536):
            pass

    async def _read_log(self, on_log: OnLog) -> None:
        async for line in _lines(self._process.stderr):
            on_log(self.name, line)

    def _log_end(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        return "; its log ends with:\n" + self._log.read_text(errors="replace")[-2000:]


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    if stream is not None:
        async for line in stream:
            yield line.decode(errors="replace").rstrip("\r\n")


class Cluster:
    """A coordinator with its verifiers, as an async context manager; everything has stopped when it is left.

    The children's stderr goes to files in the folder `logs`, or line by line to `on_log`; it is inherited if both are
    None. start_timeout_s: time that each may take to be ready. environment: further variables of all children.
    """

    verifier_module = "cloud_verifier.app"
    """Module that a verifier's process runs with `python -m`; a benchmark puts one of its own here."""
    coordinator_module = "coordinator.app"
    """Module that the coordinator's process runs with `python -m`; a benchmark puts one of its own here."""

    def __init__(
        self,
        *,
        logs: Path | None = None,
        on_log: OnLog | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._logs = logs
        self._on_log = on_log
        self._start_timeout_s = start_timeout_s
        self._environment = environment or {}
        self._named = 0
        self.coordinator: Child | None = None
        self.verifiers: list[Child] = []

    async def __aenter__(self) -> Self:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        children = [*self.verifiers, *([self.coordinator] if self.coordinator else [])]
        await asyncio.gather(*(child.stop() for child in children[:-1]))
        if children:
            await children[-1].stop()

    @property
    def address(self) -> str:
        """Return the coordinator's address; "" before it is ready."""
        return self.coordinator.address if self.coordinator else ""

    async def start_coordinator(self, *arguments: str, cores: Sequence[int] = ()) -> Child:
        command = [sys.executable, "-m", self.coordinator_module, *arguments]
        self.coordinator = await self._start("coordinator", command, cores, {**os.environ, **self._environment})
        return self.coordinator

    async def start_verifier(self, *arguments: str, cores: Sequence[int] = ()) -> Child:
        """Start a verifier that registers with the coordinator, if there is one. Several may be started at once.

        It gets no settings of the coordinator, among which are operators' and tenants' secrets.
        """
        self._named += 1
        name = f"verifier-{self._named}"
        command = [sys.executable, "-m", self.verifier_module, "--verifier-id", name, *arguments]
        if self.coordinator is not None:
            command += ["--coordinator", self.coordinator.address]
        variables = {**os.environ, **self._environment}
        known = {name: value for name, value in variables.items() if not name.startswith(_COORDINATOR)}
        child = await self._start(name, command, cores, known)
        self.verifiers.append(child)
        return child

    async def _start(
        self, name: str, command: Sequence[str], cores: Sequence[int], environment: Mapping[str, str]
    ) -> Child:
        return await Child.start(
            name,
            command,
            log=self._logs / f"{name}.log" if self._logs else None,
            on_log=self._on_log,
            cores=cores,
            timeout_s=self._start_timeout_s,
            environment=environment,
        )
