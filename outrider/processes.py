"""Tie a process to the one that started it, even if that is killed (Linux), hold its signals back, and end it fast."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_LAUNCHER = f"""
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied_to_this_process() -> list[str]:
    """Return a prefix for a command that does not outlive this process.

    It is a launcher that execs, not `preexec_fn`: forking without exec is not safe beside gRPC's threads.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]


def end_with_parent(parent: int | None = None) -> None:
    """Let Linux kill this process when its parent ends. Raises SystemExit if the parent has ended already.

    parent: its process id; None if that is unknown, but not 1, which adopts a process whose parent has ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if (os.getppid() != parent) if parent else (os.getppid() == 1):
            sys.exit(128 + signal.SIGKILL)


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Yield a list that collects SIGTERM and SIGINT, so that no step is interrupted."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, after its exit handlers but without Python's own cleanup.

    Modules and objects that are freed one by one take up to a second of CPU time, a large model several, and whoever
    waits for the end waits for all of it. What has to end in order must have ended before.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(code)


def leave_after(main: Callable[[], int | None]) -> NoReturn:
    """Run a program's `main`, then `leave` with the exit code that it returns or raises SystemExit with."""
    try:
        code: object = main()
    except SystemExit as ended:
        code = ended.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    leave(code if isinstance(code, int) else int(code is not None))
