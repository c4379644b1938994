"""Start and stop the processes of one engine: rank 0, and with tensor parallelism the other ranks.

Each rank has a socket to the front, and ends when the front's end of it closes. Only rank 0 exchanges messages over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
import stat
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType

import cloud_verifier
import outrider
from cloud_verifier.config import FRONT, INSTALL_VLLM, VerifierConfig
from outrider.core.errors import ModelRefused

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a rank ignores: terminals and supervisors send them to the whole process group, but the front decides
when to end, and drains first."""
REASON_S = 3.0
"""Seconds in which rank 0 may report by itself why another rank has ended."""
PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")
STOP_S = 1.0
"""Seconds in which a rank may end by itself; a rank that is loading does not, and is killed."""


def preloaded_libraries(python: Path) -> str:
    """Return what LD_PRELOAD should name for vLLM in the environment of this interpreter, as far as it is there.

    vLLM is fast on a CPU only with the OpenMP and the allocator that it was built for (its installation guide).
    """
    return ":".join(str(found) for name in PRELOADED for found in sorted(python.parent.parent.glob(f"lib/{name}")))


def folder_of_packages(packages: Iterable[ModuleType]) -> Path:
    """Return a folder with packages, as links, and nothing else.

    All verifiers of this user and installation use the same one: it stays when they end, in whatever way. Raises
    ModelRefused if somebody else has made a folder of its name.
    """
    sources = sorted(Path(package.__path__[0]).resolve() for package in packages)
    key = hashlib.sha256("\n".join(map(str, sources)).encode()).hexdigest()[:12]
    folder = Path(gettempdir(), f"outrider-packages-{os.getuid()}-{key}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o022:
        raise ModelRefused(f"{folder} is not a folder that this user alone may write to; remove it, or set TMPDIR")
    for source in sources:
        with contextlib.suppress(FileExistsError):
            (folder / source.name).symlink_to(source)
    return folder


class RankProcesses:
    """Starts and stops the ranks. If one other than rank 0 ends, none can go on, and `on_lost` is called once."""

    engine_module = "cloud_verifier.engine_process.main"
    """Module that every rank's process runs with `python -m`; a benchmark puts one of its own here."""
    packages: tuple[ModuleType, ...] = (outrider, cloud_verifier)
    """Packages that another interpreter finds; a benchmark adds its own."""

    def __init__(self, config: VerifierConfig, on_lost: Callable[[], None]) -> None:
        self._config = config
        self._on_lost = on_lost
        self._others: list[Process] = []
        self._sockets: list[socket.socket] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self, engine_end: socket.socket, listener: socket.socket | None = None) -> Process:
        """Start all ranks; return rank 0's process, which gets `engine_end` and `listener`. If it is cancelled midway,
        `stop` ends the ranks that have been started."""
        ends = (engine_end,) if listener is None else (engine_end, listener)
        if self._config.engine == "vllm":
            return await self._spawn(*ends, environment=self._vllm_environment())
        if self._config.ranks == 1:
            return await self._spawn(*ends)
        with socket.create_server((LOOPBACK, 0)) as store:
            port = store.getsockname()[1]
            for rank in range(1, self._config.ranks):
                ours, theirs = socket.socketpair()
                self._sockets.append(ours)
                with theirs:
                    self._others.append(await self._spawn(theirs, environment=self._environment(rank, port)))
            first = await self._spawn(*ends, environment=self._environment(0, port), store=store)
        self._watching = asyncio.create_task(self._watch())
        return first

    def expect_end(self) -> None:
        """Do not call `on_lost` when a rank ends."""
        if self._watching is not None:
            self._watching.cancel()

    async def stop(self) -> None:
        """End all ranks but rank 0."""
        self.expect_end()
        for sock in self._sockets:
            sock.close()
        ends = [asyncio.create_task(process.wait()) for process in self._others]
        if ends:
            await asyncio.wait(ends, timeout=STOP_S)
        for process, end in zip(self._others, ends, strict=True):
            if not end.done():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await end

    def _vllm_environment(self) -> dict[str, str]:
        """Return the environment of vLLM's process. Raises ModelRefused if its interpreter is none.

        Another interpreter finds our packages, and no other of this installation.
        """
        python = self._config.engine_python or Path(sys.executable)
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise ModelRefused(f"engine_python is {python}, which is no program; {INSTALL_VLLM}")
        python = python.absolute()  # a symbolic link stays one: it tells Python its environment
        preloaded = ":".join(filter(None, [preloaded_libraries(python), os.environ.get("LD_PRELOAD")]))
        changes = {"OMP_NUM_THREADS": str(self._config.threads), **({"LD_PRELOAD": preloaded} if preloaded else {})}
        if self._config.engine_python is not None:
            changes["PYTHONPATH"] = str(folder_of_packages(self.packages))
        return os.environ | changes

    async def _watch(self) -> None:
        waits = [asyncio.create_task(process.wait()) for process in self._others]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(REASON_S)
            gone = [
                f"{rank} (exit status {p.returncode})"
                for rank, p in enumerate(self._others, 1)
                if p.returncode is not None
            ]
            log.error("rank %s of the engine has ended; ending the others", ", ".join(gone))
            self._on_lost()
        finally:
            for wait in waits:
                wait.cancel()

    async def _spawn(
        self, *ends: socket.socket, environment: dict[str, str] | None = None, store: socket.socket | None = None
    ) -> Process:
        passed = (*ends, *([] if store is None else [store]))
        # A Ctrl-C reaches the whole process group: the new process must not die of it before it ignores signals.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        python = str(self._config.engine_python or sys.executable)
        try:
            return await asyncio.create_subprocess_exec(
                python,
                "-m",
                self.engine_module,
                ",".join(str(end.fileno()) for end in ends),
                self._config.model_dump_json(exclude={"join_token"}),  # every user of the machine may read this
                *([] if store is None else [str(store.fileno())]),
                pass_fds=[sock.fileno() for sock in passed],
                env=environment,
            )
        except OSError as error:
            raise ModelRefused(f"{python} cannot be started: {error.strerror}; {INSTALL_VLLM}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """Return a rank's environment, with what torchrun would set; nothing listens beyond this machine."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
        interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
        # transformers splits over GPUs wherever it sees one.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self._config.device == "cpu" else {}
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._config.tensor_parallel, FRONT: os.getpid()}
        numbers = {name: str(number) for name, number in place.items()}
        return interfaces | inherited | hidden | numbers | {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
