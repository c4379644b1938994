"""Run a whole cluster as child processes on this machine: for `outrider up`, `outrider demo`, tests and benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from coordinator import START_TIMEOUT_S
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, OutriderError, Unavailable
from outrider.processes import tied_to_this_process
from outrider.settings import VARIABLE

STOP_TIMEOUT_S = 15.0
EXIT_REFUSED = 2
"""Exit code of a coordinator or verifier that refuses its settings or its files."""
MAX_LINE = 1 << 26
"""Bytes of a line that a child may write."""
QUICK_S = 60.0
"""Seconds after it was ready within which a child's end is a quick one."""
QUICK_ENDS = 5
"""Quick ends in a row after which a child is not started again."""
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Seconds until a child that has ended is started again: after the first quick end, doubling, and at most."""
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

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        on_log: OnLog | None = None,
        cores: Sequence[int] = (),
        timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Take a command, whose stderr goes line by line to `on_log`, or is inherited without one.

        cores: CPUs to pin it to, all if empty. environment: its variables, by default those of this process.
        """
        self.name = name
        self.address = ""
        self._command = command
        self._on_log = on_log
        self._cores = cores
        self._timeout_s = timeout_s
        self._environment = environment
        self._process: asyncio.subprocess.Process
        self._readers: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        """Start the command and wait until it prints where it listens; a later start listens there, too.

        Raises Unavailable, or BadRequest if it refuses its settings or its files.
        """
        pin = ["taskset", "--cpu-list", ",".join(map(str, self._cores))] if self._cores else []
        again = ["--listen", self.address] if self.address else []
        self._process = await asyncio.create_subprocess_exec(
            *tied_to_this_process(),
            *pin,
            *self._command,
            *again,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if self._on_log else None,
            start_new_session=True,
            env=self._environment,
            limit=MAX_LINE,
        )
        self._readers = [asyncio.create_task(self._read_log(self._on_log))] if self._on_log else []
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._await_ready()
        except TimeoutError:
            await self.stop()
            raise Unavailable(
                f"{self.name} was not ready within {self._timeout_s:.0f} s; a large model may need a longer"
                " --start-timeout-s"
            ) from None
        except BaseException:  # a caller that gives up waiting must not leave it running, nor its scratch
            await self.stop()
            raise
        self._readers.append(asyncio.create_task(self._drain()))
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return its exit code once it has ended: the signal that ended it, negative, if one did."""
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
        raise refused(f"{self.name} {_how_it_ended(code)} before it was ready")

    async def _drain(self) -> None:
        """Read stdout to its end, since a child that writes more must not block on a full pipe."""
        while self._process.stdout and await self._process.stdout.read(65536):
            pass

    async def _read_log(self, on_log: OnLog) -> None:
        async for line in _lines(self._process.stderr):
            on_log(self.name, line)


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    if stream is not None:
        async for line in stream:
            yield line.decode(errors="replace").rstrip("\r\n")


def _how_it_ended(code: int) -> str:
    """Return in words what an exit code says, which is a signal's number if it is negative."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
    return f"was ended by signal {-code}"


class Cluster:
    """A coordinator with its verifiers, as an async context manager; everything has stopped when it is left.

    The children's stderr goes line by line to `on_log`; it is inherited without one. start_timeout_s: time that each
    may take to be ready. environment: further variables of all children.
    """

    verifier_module = "cloud_verifier.app"
    """Module that a verifier's process runs with `python -m`; a benchmark puts one of its own here."""
    coordinator_module = "coordinator.app"
    """Module that the coordinator's process runs with `python -m`; a benchmark puts one of its own here."""

    def __init__(
        self,
        *,
        on_log: OnLog | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._on_log = on_log
        self._start_timeout_s = start_timeout_s
        self._environment = environment or {}
        self._named = 0
        self.coordinator: Child | None = None
        self.verifiers: list[Child] = []

    async def __aenter__(self) -> Self:
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
        child = Child(
            name,
            command,
            on_log=self._on_log,
            cores=cores,
            timeout_s=self._start_timeout_s,
            environment=environment,
        )
        return await child.start()

    async def keep(self, say: Callable[[str], None]) -> bool:
        """Start children that end again, at their addresses, until the last verifier has ended for good.

        That ends with the coordinator, too, if it is given up. say: called with what has happened. Return whether all
        verifiers have ended in order, as after a drain.
        """
        last = asyncio.gather(*(self._kept(child, say) for child in self.verifiers))
        coordinator = asyncio.create_task(self._kept(self.coordinator, say)) if self.coordinator else last
        try:
            await asyncio.wait({last, coordinator}, return_when=asyncio.FIRST_COMPLETED)
            return last.done() and all(last.result())
        finally:
            last.cancel()
            coordinator.cancel()
            await asyncio.gather(last, coordinator, return_exceptions=True)

    async def _kept(self, child: Child, say: Callable[[str], None]) -> bool:
        """Start a child again whenever it ends. Return True once a verifier has drained, False if one is given up."""
        ends = 0
        while True:
            since = time.monotonic()
            code = await child.wait()
            if code == 0 and child is not self.coordinator:
                say(f"{child.name} has drained and ended")
                return True
            ends = ends + 1 if time.monotonic() - since < QUICK_S else 1
            if ends == QUICK_ENDS:
                say(f"{child.name} {_how_it_ended(code)}, for the {ends}th time soon after its start: it is given up")
                return False
            pause_s = backoff_s(ends, PAUSE_S, MAX_PAUSE_S, jitter=0.0)
            say(f"{child.name} {_how_it_ended(code)}; it is started again in {pause_s:g} s")
            await child.kill()  # what is left of its group
            await asyncio.sleep(pause_s)
            try:
                await child.start()
                say(f"{child.name} is ready again at {child.address}")
            except (OutriderError, OSError) as error:
                say(str(error))
