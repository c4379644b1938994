"""Test that no program that fails to start shows a secret: not in its output, and not in its log."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from coordinator.store.embedded_redis import _binary

ROOT = Path(__file__).resolve().parents[2]
SECRET = "geheim-0123456789abcdef"
COORDINATOR = "outrider-coordinator --listen 127.0.0.1:0 --state-dir DIR"
PAIR = "--model tests/pair/target --draft tests/pair/draft.gguf"
UP = f"outrider up --listen 127.0.0.1:0 --state-dir DIR {PAIR}"
VERIFIER = "outrider-verifier --model tests/pair/target"
MODULES = {
    "outrider": "coordinator.cli",
    "outrider-coordinator": "coordinator.app",
    "outrider-edge": "edge_agent.cli",
    "outrider-verifier": "cloud_verifier.app",
}
IMPORTED = ("coordinator.api.server", "coordinator.cli.local", "coordinator.cli.output", "edge_agent.sdk.client")
"""Modules that the programs import as they begin their work."""
BAD_REDIS = (
    "user:SECRET@h:6379",
    ":SECRET@h:6379",
    "redis://:SECRET@h:99999",
    "redis://u:SECRET/@h:1",
    "rediss:SECRET@h",
)
UNUSABLE_REDIS = ("redis://u:SECRET@127.0.0.1:1", "redis://:SECRET@127.0.0.1:PORT", "redis://u:SECRET@127.0.0.1:PORT")
FAILURES: list[tuple[str, str, str]] = [
    *((f"{COORDINATOR} --redis {url}", "", "redis is") for url in BAD_REDIS),
    *((f"{COORDINATOR} --redis {url}", "", "cannot be used") for url in UNUSABLE_REDIS),
    (f"{COORDINATOR} --redis {BAD_REDIS[0]} --check-config", "", "***@h:6379"),
    (f"{COORDINATOR} --redis h:1?password=SECRET --check-config", "", "password=***"),
    ("outrider-coordinator --listen u:SECRET@h:1", "", "got '***@h:1'"),
    ("outrider-coordinator --admin-token SECRET", "", "--admin-token ***"),
    (COORDINATOR, "OUTRIDER_COORDINATOR_JOIN_TOKEN=SECRET\n", "JOIN_TOKEN: must be printable"),
    (f"{COORDINATOR} --tls-cert no --tls-key no --redis redis://:SECRET@h", "OUTRIDER_COORDINATOR_ADMIN_TOKEN=SECRET",
     "TLS key no cannot be read"),
    (f"{UP} --redis {BAD_REDIS[2]}", "", "redis is redis://h:99999,"),
    (f"outrider up --state-dir DIR {PAIR} --listen u:SECRET@h:1", "", "***@h:1"),
    ("outrider up --admin-token=SECRET", "", "--admin-token=***"),
    (f"{UP} --tls-cert no --tls-key no", "OUTRIDER_COORDINATOR_ADMIN_TOKEN=SECRET", "cannot be used"),
    (f"{VERIFIER} --listen u:SECRET@h:1", "", "got '***@h:1'"),
    (f"{VERIFIER} --coordinator u:SECRET@h:1", "", "got '***@h:1'"),
    (f"{VERIFIER} --join-token SECRET", "", "--join-token ***"),
    (VERIFIER, "OUTRIDER_VERIFIER_JOIN_TOKEN=SECRET\n", "JOIN_TOKEN: must be printable"),
    ("outrider-edge serve --listen u:SECRET@h:1", "", "***@h:1"),
    ("outrider-edge serve --coordinator http://u:SECRET@h:1", "", "got 'http://***@h:1'"),
    ("outrider-edge serve --api-key SECRET", "", "--api-key ***"),
    ("outrider-edge serve --listen 127.0.0.1:0", "OUTRIDER_EDGE_API_KEY=SECRET\n", "printable"),
    ("outrider-edge generate --tls-ca no x", "OUTRIDER_EDGE_API_KEY=SECRET", "cannot be read"),
    ("outrider status --coordinator u:SECRET@h:1", "", "got '***@h:1'"),
    ("outrider status --token SECRET", "", "--token ***"),
    ("outrider status --ca no", "OUTRIDER_ADMIN_TOKEN=SECRET", "cannot be read"),
    ("outrider status --coordinator 127.0.0.1:1", "OUTRIDER_ADMIN_TOKEN=SECRET", "cannot be reached"),
    ("outrider status", "OUTRIDER_ADMIN_TOKEN=SECRET\n", "TOKEN: must be printable"),
    *((f"outrider status --insecure --coordinator {host}.invalid:1", f"http_proxy={proxy}u:SECRET@127.0.0.1:1",
       "***@127.0.0.1:1 (http_proxy)") for host, proxy in (("bare", ""), ("whole", "http://"))),
]  # fmt: skip


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run a Redis server on a port of loopback that wants another password; return the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(tmp_path_factory.mktemp("redis")),
        "--requirepass",
        "x",
    )
    process = subprocess.Popen([_binary(), "--port", str(port), *options], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            try:
                redis.Redis(port=port, password="x").ping()
                break
            except redis.ConnectionError:
                time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait()


_SERVER = f"""
import json, os, sys
from importlib import import_module
for module in {[*MODULES.values(), *IMPORTED]}:
    import_module(module)
for line in sys.stdin:
    module, arguments, variables = json.loads(line)
    if pid := os.fork():
        print(pid, flush=True)
        print("\\nended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    else:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= variables
        sys.argv = [module, *arguments]
        sys.exit(import_module(module).main())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Run a process that has imported what programs import, and forks for each: their starts show no secret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR"}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
        start_new_session=True,
    ) as process:  # fmt: skip
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("command", "variable", "said"), FAILURES)
def test_a_start_that_fails_shows_no_secret(
    server: subprocess.Popen[str], command: str, variable: str, said: str, port: int, tmp_path: Path
) -> None:
    program, *arguments = (
        word.replace("SECRET", SECRET).replace("DIR", str(tmp_path)).replace("PORT", str(port))
        for word in command.split(" ")
    )
    name, _, value = variable.replace("SECRET", SECRET).partition("=")
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([MODULES[program], arguments, {name: value} if name else {}]), file=server.stdin, flush=True)
    pid, output = int(server.stdout.readline()), ""
    while not (line := server.stdout.readline()).startswith("ended "):
        assert line, output
        output += line
        if "store" in line and said in line:  # a coordinator serves on, and waits for its store
            os.kill(pid, signal.SIGTERM)
    assert said in output
    assert SECRET not in output and "Traceback" not in output
    assert line.split() != ["ended", "0"] or "store" in output or "--check-config" in command
