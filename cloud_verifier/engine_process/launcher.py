"""Start the engine's process, in this interpreter or, for vLLM, in another one that finds our packages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import stat
import sys
from asyncio.subprocess import Process
from collections.abc import Iterable
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType

import cloud_verifier
import outrider
from cloud_verifier.config import INSTALL_VLLM, VerifierConfig
from outrider.core.errors import ModelRefused

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the engine ignores: terminals and supervisors send them to the whole process group, but the front
decides when to end, and drains first."""
ENGINE_MODULE = "cloud_verifier.engine_process.main"
"""Module that the process runs with `python -m`; a benchmark puts one of its own here."""
PACKAGES: tuple[ModuleType, ...] = (outrider, cloud_verifier)
"""Packages that another interpreter finds; a benchmark adds its own."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment in which large arrays are in huge pages: a step's logits, tens of megabytes that are allocated and freed
in every step, cost tens of page faults instead of ten thousands."""
PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")


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


async def start_process(config: VerifierConfig, engine_end: socket.socket) -> Process:
    """Return the engine's process, which gets `engine_end`, and ends when the front's end of that socket closes.

    Raises ModelRefused if it cannot start.
    """
    # A Ctrl-C reaches the whole process group: the new process must not die of it before it ignores signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    python = str(config.engine_python or sys.executable)
    try:
        return await asyncio.create_subprocess_exec(
            python,
            "-m",
            ENGINE_MODULE,
            str(engine_end.fileno()),
            config.model_dump_json(exclude={"join_token"}),  # every user of the machine may read this
            pass_fds=[engine_end.fileno()],
            env=_vllm_environment(config) if config.engine == "vllm" else HUGE_PAGES | os.environ,
        )
    except OSError as error:
        raise ModelRefused(f"{python} cannot be started: {error.strerror}; {INSTALL_VLLM}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _vllm_environment(config: VerifierConfig) -> dict[str, str]:
    """Return the environment of vLLM's process: another interpreter finds our packages, and no other of ours."""
    python = (config.engine_python or Path(sys.executable)).absolute()  # a link stays one: it tells the environment
    preloaded = ":".join(filter(None, [preloaded_libraries(python), os.environ.get("LD_PRELOAD")]))
    changes = {"OMP_NUM_THREADS": str(config.threads), **({"LD_PRELOAD": preloaded} if preloaded else {})}
    if config.engine_python is not None:
        changes["PYTHONPATH"] = str(folder_of_packages(PACKAGES))
    return os.environ | changes
