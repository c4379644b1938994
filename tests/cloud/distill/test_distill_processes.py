"""Test the loop as a real process with a real gRPC coordinator: after SIGKILL the next one goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import World

from cloud_verifier.distill.errors import PermanentFailure, StageFailed, TooLittleTraffic
from cloud_verifier.distill.publishing.publisher import create_key
from cloud_verifier.distill.publishing.release_client import CANARY, STABLE, ReleaseRecord
from cloud_verifier.distill.stage_processes import run_stage
from cloud_verifier.distill.state import LoopState
from outrider.core.errors import PermissionDenied
from outrider.wire import channels
from outrider.wire.manifest import read_unverified
from outrider.wire.status import aborting
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

SCRIPT = Path(__file__).with_name("loop_process.py")


class Admin(coordinator_pb2_grpc.AdminServicer):
    """Serve the part of the Admin service that concerns releases, over a dictionary."""

    def __init__(self) -> None:
        self.known: dict[str, ReleaseRecord] = {}
        self.published: list[bytes] = []

    async def ListReleases(self, request: Any, context: Any) -> pb.ListReleasesResponse:
        async with aborting(context):
            self._check(context)
            return pb.ListReleasesResponse(releases=[_release(known) for known in self.known.values()])

    async def PublishRelease(self, request: Any, context: Any) -> pb.PublishReleaseResponse:
        async with aborting(context):
            self._check(context)
            manifest = read_unverified(request.manifest)
            if manifest.digest not in self.known:
                self.published.append(request.manifest)
                self.known[manifest.digest] = ReleaseRecord(manifest, request.manifest, CANARY)
            return pb.PublishReleaseResponse(state=_state(self.known[manifest.digest].state))

    async def UpdateRelease(self, request: Any, context: Any) -> pb.UpdateReleaseResponse:
        async with aborting(context):
            self._check(context)
            old = self.known[request.release]
            self.known[request.release] = ReleaseRecord(old.manifest, old.raw, STABLE)
            return pb.UpdateReleaseResponse(release=_release(self.known[request.release]))

    def decide(self, state: str) -> None:
        self.known = {digest: ReleaseRecord(one.manifest, one.raw, state) for digest, one in self.known.items()}

    @staticmethod
    def _check(context: Any) -> None:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer sesame":
            raise PermissionDenied("wrong admin token")


def _state(name: str) -> Any:
    return pb.ReleaseState.Value(f"RELEASE_STATE_{name.upper()}")


def _release(known: ReleaseRecord) -> pb.Release:
    return pb.Release(manifest=known.raw, state=_state(known.state), reason=known.reason)


@pytest.fixture
def admin() -> Admin:
    return Admin()


@pytest.fixture
async def address(admin: Admin) -> AsyncIterator[str]:
    server = channels.server()
    coordinator_pb2_grpc.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def start(tmp_path: Path, address: str) -> AsyncIterator[Callable[[], Awaitable[asyncio.subprocess.Process]]]:
    """Start the loop, with one run's traffic waiting; all processes end with the test."""
    create_key(tmp_path / "key.pem")
    started: list[asyncio.subprocess.Process] = []

    async def begin() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), str(tmp_path), address), stdout=asyncio.subprocess.PIPE
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until(true: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.02)


def trainers(folder: Path) -> list[tuple[int, int]]:
    """Return (pid, niceness) of every trainer that was started."""
    file = folder / "trainers"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(pid), int(nice)) for pid, nice in (line.split() for line in lines)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_killed_in_training_the_loop_goes_on_and_publishes_once(
    start: Callable[[], Awaitable[asyncio.subprocess.Process]], admin: Admin, tmp_path: Path
) -> None:
    first = await start()
    await until(lambda: len(trainers(tmp_path)) == 1, "a trainer")
    os.kill(first.pid, signal.SIGKILL)
    orphan, niceness = trainers(tmp_path)[0]
    assert niceness == os.nice(0) + 3
    if sys.platform == "linux":
        await until(lambda: not runs(orphan), "the end of the first loop's trainer")
    await start()
    await until(lambda: len(trainers(tmp_path)) == 2, "a trainer of the second loop")
    os.kill(trainers(tmp_path)[1][0], signal.SIGKILL)
    await until(lambda: len(trainers(tmp_path)) == 3, "a trainer after one was killed")
    (tmp_path / "go").touch()
    await until(lambda: len(admin.published) == 1, "a release")
    admin.decide(STABLE)
    folder = tmp_path / "state"
    await until(lambda: len(LoopState.load(folder).history) == 1, "the end of the run")
    assert LoopState.load(folder).history[0].result == "stable"
    assert len(admin.published) == 1


async def test_sigterm_ends_the_loop_and_its_stage_without_an_error(
    start: Callable[[], Awaitable[asyncio.subprocess.Process]], tmp_path: Path
) -> None:
    process = await start()
    await until(lambda: len(trainers(tmp_path)) == 1, "a trainer")
    process.terminate()
    out, _ = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out) == (0, b"ended in order\n")
    assert not runs(trainers(tmp_path)[0][0])
    run = LoopState.load(tmp_path / "state").run
    assert run is not None and (run.stage, run.failures) == ("training", 0)


async def test_a_stage_that_hangs_is_ended_and_one_that_fails_gives_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "stage.py"
    script.write_text(
        "import sys, time\n"
        "if sys.argv[1] == 'hangs': time.sleep(60)\n"
        "print('the disk is full', file=sys.stderr); sys.exit({'permanent': 3, 'early': 4}.get(sys.argv[1], 1))\n"
    )
    modules = {name: [str(script), name] for name in ("hangs", "fails", "permanent", "early")}
    config = World(tmp_path, settings={"nice": 0, "stage_minutes": 0.5 / 60}).config
    with pytest.raises(StageFailed, match="ended"):
        await run_stage(config, "hangs", tmp_path, modules)
    config = config.model_copy(update={"stage_minutes": 0.5})
    with pytest.raises(StageFailed, match="the disk is full") as failed:
        await run_stage(config, "fails", tmp_path, modules)
    assert type(failed.value) is StageFailed
    with pytest.raises(PermanentFailure):
        await run_stage(config, "permanent", tmp_path, modules)
    with pytest.raises(TooLittleTraffic):
        await run_stage(config, "early", tmp_path, modules)
