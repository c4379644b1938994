"""Test that Ctrl-C ends a starting program at once, quietly, with an interrupt's exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from small_pair import DRAFT, TARGET

from cloud_verifier.distill.publisher import create_key

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
LAST_IMPORTS = {
    "outrider": "coordinator.cli.output",
    "outrider-coordinator": "coordinator.api.server",
    "outrider-distill": "cloud_verifier.distill.loop",
    "outrider-edge": "edge_agent.sdk.client",
    "outrider-verifier": "cloud_verifier.verifier",
}
"""A module after whose import a program begins its work. Python names those that an import statement imports."""
MOMENT_S = 0.02
AT_ONCE_S = 60.0
"""Most seconds on a busy machine; a program that goes on until it is ready takes longer, or never ends."""


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that takes connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def arguments(name: str, silent: str, folder: Path) -> Sequence[str]:
    """Return a command line with which a program does not end by itself in its first moments."""
    target, draft, key = str(TARGET), str(DRAFT), folder / "publisher-key.pem"
    if not key.exists():
        create_key(key)
    return {
        "outrider": ["status", "--coordinator", silent],
        "outrider-coordinator": ["--listen", "127.0.0.1:0", "--state-dir", str(folder)],
        "outrider-distill": [
            *("run", "--target", target, "--draft", draft),
            *("--traffic", str(folder / "traffic"), "--artifacts", str(folder / "artifacts")),
            *("--key", str(key), "--state-dir", str(folder / "state")),
        ],
        "outrider-edge": ["chat", "--verifier", silent, "--message", "x"],
        "outrider-verifier": ["--listen", "127.0.0.1:0", "--model", target],
    }[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_ctrl_c_in_the_first_moments_ends_a_program_quietly(name: str, silent: str, tmp_path: Path) -> None:
    stops_in_order = {"outrider-coordinator", "outrider-distill", "outrider-verifier"}  # once they have begun to serve
    codes = {130, 0} if name in stops_in_order else {130}
    for imported in (SCRIPTS[name].partition(":")[0], LAST_IMPORTS[name]):  # our first line, and when its work begins
        code, said = interrupted(name, arguments(name, silent, tmp_path), imported)
        assert code in codes, f"after {imported}: {said}"
        assert "Traceback" not in said and "KeyboardInterrupt" not in said, f"after {imported}: {said}"


def interrupted(name: str, arguments: Sequence[str], imported: str) -> tuple[int, str]:
    """Return exit code and stderr of a program that gets a Ctrl-C a moment after it has imported a module.

    How long that takes, and Python's own start before it, is up to a busy machine.
    """
    module, _, function = SCRIPTS[name].partition(":")
    code = f"from {module} import {function}; {function}()"
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).rstrip().endswith(imported):
            assert line, "it ended by itself"
        time.sleep(MOMENT_S)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=AT_ONCE_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, "\n".join(line for line in said.splitlines() if not line.startswith("import time:"))
