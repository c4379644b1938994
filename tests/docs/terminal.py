"""Emulate a reader's terminal: the commands of a page run one after the other, in one shell, on its own loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pages import ROOT

COMMAND_S = 60.0
READY_S = 90.0
STOP_S = 30.0
ENDED = (0, 128 + signal.SIGINT)
"""Exit status of a command after Ctrl-C: servers stop in order, a view is interrupted."""
_SHELL = """
[ -e "$DOC_STATE/env" ] && . "$DOC_STATE/env"
[ -e "$DOC_STATE/cwd" ] && cd "$(cat "$DOC_STATE/cwd")"
(exit "$(cat "$DOC_STATE/code" 2>/dev/null || echo 0)")
eval "$1"
code=$?
export -p > "$DOC_STATE/env"; pwd > "$DOC_STATE/cwd"; echo "$code" > "$DOC_STATE/code"
exit "$code"
"""
"""A script that carries variables, folder and exit status from one command to the next."""
ENDLESS = (
    (re.compile(r"\boutrider up\b"), re.compile(r"^ready: ", re.MULTILINE)),
    (re.compile(r"\boutrider-edge serve\b"), re.compile(r"^serving at ", re.MULTILINE)),
    (re.compile(r"\boutrider-coordinator\b"), re.compile(r"^listening on ", re.MULTILINE)),
    (re.compile(r"\boutrider-verifier\b"), re.compile(r"^listening on ", re.MULTILINE)),
    (re.compile(r"\boutrider-distill run\b"), re.compile(r"watching", re.MULTILINE)),
    (re.compile(r"\boutrider .*--watch\b"), re.compile(r"^[A-Z]{4,}\b", re.MULTILINE)),  # a table's head
)
"""Commands that go on until Ctrl-C, and the text that they print once they are ready."""

_AT_ONCE = re.compile(r" --(help|version|check-config)\b")
"""Options with which they end by themselves."""


@dataclass(frozen=True)
class CommandResult:
    """Hold the output and the exit status of a command that has ended."""

    code: int
    out: str
    err: str


class Network:
    """Provide a loopback on which the pages' ports are free; the machine's own where Linux allows none."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        self.state_dir: Path | None = None
        """The state directory of the cluster that runs in it, where that was started from another terminal."""

    def __enter__(self) -> Network:
        hold = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "ip link set lo up && echo up && cat"]
        with contextlib.suppress(FileNotFoundError):
            holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if holder.stdout is not None and holder.stdout.readline() == b"up\n":
                self._holder = holder
            else:
                holder.communicate()
        return self

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder.communicate()

    @property
    def prefix(self) -> Sequence[str]:
        """Return the command that runs another one in it."""
        if self._holder is None:
            return ()
        return ("nsenter", "--target", str(self._holder.pid), "--user", "--net", "--preserve-credentials")


class Terminal:
    """Run commands. Use it as a context manager; at its end, running ones get a Ctrl-C and must exit with 0.

    Scripts in the background are stopped after them, with any exit status.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.folder = folder
        self._network = network
        self._endless: dict[str, Endless] = {}
        self._scripts: list[Endless] = []
        _lay_out(folder)
        self.environment = _environment(folder)
        if network.state_dir is not None:  # as for the same user on the same machine
            self.environment["OUTRIDER_COORDINATOR_STATE_DIR"] = str(network.state_dir)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        endings = {name: running.stop() for name, running in reversed(self._endless.items())}
        for script in self._scripts:
            script.stop()
        if kind is None:
            for name, result in endings.items():
                _check_end(name, result)

    def type(self, command: str) -> CommandResult | None:
        """Run a command to its end, or until it is ready and return None if it does not end by itself."""
        for program, ready in ENDLESS:
            if (found := program.search(command)) and not _AT_ONCE.search(command):
                self._begin(found[0].split(" --")[0], command, ready)
                return None
        ended = self._run(["bash", "-c", _SHELL, "doc", command], COMMAND_S)
        return CommandResult(ended.returncode, ended.stdout, ended.stderr)

    def python(self, program: str) -> CommandResult:
        """Run a script as a reader would who has saved it in a file."""
        ended = self._run([sys.executable, "-c", program], COMMAND_S)
        return CommandResult(ended.returncode, ended.stdout, ended.stderr)

    def begin_python(self, program: str) -> Endless:
        """Start a script in the background. It goes on until the terminal ends."""
        script = self._in_background([sys.executable, "-c", program])
        self._scripts.append(script)
        return script

    def _in_background(self, command: Sequence[str]) -> Endless:
        log = self.folder / f".{len(list(self.folder.glob('.*.log')))}.log"
        return Endless([*self._network.prefix, *command], log, self.environment)

    def _begin(self, name: str, command: str, ready: re.Pattern[str]) -> None:
        if (before := self._endless.pop(name, None)) is not None:
            _check_end(name, before.stop())
        running = self._in_background(["bash", "-c", _SHELL, "doc", command])
        self._endless[name] = running
        running.until(ready)

    def _run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._network.prefix, *command],
            cwd=self.folder,
            env=self.environment,
            input="",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


class Endless:
    """Control a command that goes on until Ctrl-C."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=log.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def check(self) -> None:
        """Fail if it has ended."""
        assert self._process.poll() is None, f"it ended with {self._process.returncode}: {self.output}"

    def until(self, ready: re.Pattern[str]) -> None:
        """Wait until it has printed this."""
        end = time.monotonic() + READY_S
        while not ready.search(self.output):
            self.check()
            assert time.monotonic() < end, f"not ready within {READY_S:.0f} s: {self.output}"
            time.sleep(0.05)

    def stop(self) -> CommandResult:
        """Send Ctrl-C as a terminal does: to all of its processes."""
        self._signal(signal.SIGINT)
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            code = self._process.wait()
        return CommandResult(code, self.output, "")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _check_end(name: str, result: CommandResult) -> None:
    assert result.code in ENDED, f"{name} ended with {result.code} at Ctrl-C: {result.out[-2000:]}"
    assert "Traceback" not in result.out, f"{name}: {result.out[-2000:]}"


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment without the caller's settings, with the commands of this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "OTEL_", "XDG_"))}
    return {
        **kept,
        "HOME": str(folder),
        "PATH": f"{folder / '.bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DOC_STATE": str(folder / ".state"),
        "HF_HUB_OFFLINE": "1",
        "OUTRIDER_VERIFIER_TOKEN_BUDGET": "64",  # a start measures steps of up to so many rows
    }


def _lay_out(folder: Path) -> None:
    """Lay out a reader's folder: the commands, the repository's files, and our models in the place of the reader's."""
    for name in (".bin", ".state", "path/to"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry in scripts.items():
        module, _, function = entry.partition(":")
        script = folder / ".bin" / name
        script.write_text(f"#!{sys.executable}\nfrom {module} import {function}\nraise SystemExit({function}())\n")
        script.chmod(0o755)
    for name in ("models", "examples", "docker", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "path/to/target").symlink_to(ROOT / "models" / "target")
    (folder / "path/to/draft.gguf").symlink_to(ROOT / "models" / "draft.gguf")


@contextlib.contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """Yield a terminal in an empty folder, on a loopback of its own where there is one."""
    with Network() as network, Terminal(network, folder) as opened:
        yield opened
