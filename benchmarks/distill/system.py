"""Run the system under test, each part a process that can be killed: Redis, coordinator, verifier, the loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.distill.size import DistillSize
from benchmarks.support import proc
from benchmarks.support.old_harness import Pair
from cloud_verifier.distill.publishing.publisher import create_key
from cloud_verifier.distill.publishing.release_client import STABLE, ReleaseClient, ReleaseRecord
from cloud_verifier.distill.state import LoopState
from coordinator.cluster import Child, Cluster, stand_apart
from coordinator.store.embedded_redis import EmbeddedServer
from outrider.core.errors import Unavailable
from outrider.processes import tied_to_this_process

_TRAINER = b"cloud_verifier.distill.training.run"
_RETRY_S = 2.0
_CANARY_SHARE = 0.5
"""Share of eight devices that get a trial; a smaller one would choose one or two."""
_DAILY_MINUTES = 0.5
"""Daily budget of training, which the first run exceeds, so that no second one disturbs what is measured next."""


class DistillSystem:
    """Run the system. Use it as an async context manager; everything has stopped when it is left."""

    def __init__(self, pair: Pair, scale: DistillSize, folder: Path) -> None:
        self.pair = pair
        self.folder = folder
        self.logs = folder / "logs"
        self.artifacts = folder / "artifacts"
        self.state_dir = folder / "distill"
        self.key = folder / "publisher.pem"
        self.redis = EmbeddedServer()
        self._scale = scale
        self._ports = free_ports(2)
        self._cluster = Cluster(logs=self.logs)
        self._loop: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        stand_apart(self.folder)
        os.environ.update(self._settings())
        self.artifacts.mkdir()
        self.public_key = create_key(self.key).public_key.hex()
        self.redis.__enter__()
        try:
            await self._cluster.__aenter__()
            await self.start_coordinator()
            await self._cluster.start_verifier("--model", str(self.pair.target), "--draft", str(self.pair.narrow))
            await self._publish_first()
            await self._start_loop()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._loop.returncode is None:
            self._loop.terminate()
            await self._loop.wait()
        await self._cluster.__aexit__(kind, error, trace)
        self.redis.__exit__(kind, error, trace)

    # --- parts

    @property
    def address(self) -> str:
        """Return the coordinator's address, which it keeps over restarts."""
        return f"127.0.0.1:{self._ports[0]}"

    async def start_coordinator(self) -> Child:
        return await self._cluster.start_coordinator(
            *("--listen", self.address, "--redis", self.redis.url, "--state-dir", str(self.folder / "coordinator")),
            *("--artifacts", str(self.artifacts), "--http", f"127.0.0.1:{self._ports[1]}"),
        )

    async def kill_coordinator(self) -> None:
        """Send SIGKILL to the coordinator."""
        if self._cluster.coordinator is not None:
            await self._cluster.coordinator.kill()

    @property
    def unusual(self) -> str:
        """Describe the settings that affect the measurement and differ from a cluster's own."""
        scale = self._scale
        gate = ", ".join(f"{name} {value}" for name, value in scale.gate.items())
        return (
            f"prompts are recorded as context; alarm_fall {scale.alarm_fall}, alarm_tokens {scale.alarm_tokens},"
            f" run_tokens {scale.run_tokens}, dataset {scale.dataset},"
            f" training {scale.training | {'steps': scale.steps}}, canary: share {_CANARY_SHARE},"
            f" bound {scale.canary_bound}, alpha {scale.canary_alpha}, {scale.session_samples}"
            f" samples of a session, window {scale.canary_s:.0f} s{f'; {gate}' if gate else ''}"
        )

    @property
    def loop_runs(self) -> bool:
        """Return whether the latest process of the loop still runs."""
        return self._loop is not None and self._loop.returncode is None

    def state(self) -> LoopState:
        """Return the state of the loop as it was last written."""
        return LoopState.load(self.state_dir)

    def run_folder(self, number: int) -> Path:
        return self.state_dir / "runs" / str(number)

    async def kill_loop(self) -> int:
        """Send SIGKILL to the loop and start it again, as a supervisor would; return the killed process's id."""
        process = self._running_loop()
        process.kill()
        await process.wait()
        await self._start_loop()
        return process.pid

    async def kill_trainer(self) -> int:
        """Send SIGKILL to the loop's child that trains; return its process id. Raises Unavailable if there is none."""
        for pid in proc.children(self._running_loop().pid):
            with contextlib.suppress(OSError):
                if _trains(pid):
                    os.kill(pid, signal.SIGKILL)
                    return pid
        raise Unavailable("the loop has no child that trains")

    async def releases(self) -> dict[str, ReleaseRecord]:
        """Return the releases by digest, as the coordinator has them; empty if it cannot be reached."""
        async with ReleaseClient(self.address) as coordinator:
            try:
                return {known.digest: known for known in reversed(await coordinator.list())}
            except Unavailable:
                return {}

    async def distill(self, *arguments: str) -> str:
        """Run `outrider-distill` as a child; return its output. Raises Unavailable if it fails."""
        process = await asyncio.create_subprocess_exec(
            *(*_program(), *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise Unavailable(f"outrider-distill {arguments[0]} failed: {output.decode(errors='replace')[-1500:]}")
        return output.decode(errors="replace")

    def show_logs(self) -> None:
        """Print the end of every log."""
        for log in sorted(self.logs.glob("*.log")) + sorted(self.state_dir.glob("runs/*/*.log")):
            print(f"--- end of {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)

    def _running_loop(self) -> asyncio.subprocess.Process:
        if self._loop is None:
            raise Unavailable("the loop has not begun")
        return self._loop

    async def _publish_first(self) -> None:
        """Publish the narrow draft and make it stable: devices with keys load none that is not signed."""
        await self.distill("publish", str(self.pair.narrow))
        async with ReleaseClient(self.address) as coordinator:
            [first] = await coordinator.list()
            state = first.state
            while state != STABLE:
                state = await coordinator.promote(first.digest)

    async def _start_loop(self) -> None:
        with (self.logs / "loop.log").open("ab") as log:
            self._loop = await asyncio.create_subprocess_exec(
                *tied_to_this_process(), *_program(), "run", stdout=log, stderr=log
            )

    def _settings(self) -> dict[str, str]:
        """Return the settings of all processes, for their environments."""
        scale = self._scale
        for name in [name for name in os.environ if name.startswith("OUTRIDER_DISTILL_")]:
            del os.environ[name]
        traffic = str(self.folder / "traffic")
        distill = {
            "traffic": traffic,
            "target": self.pair.target,
            "draft": self.pair.narrow,
            "artifacts": self.artifacts,
            "key": self.key,
            "state_dir": self.state_dir,
            "coordinator": self.address,
            "poll_s": 1.0,
            "retry_s": _RETRY_S,
            "nice": 5,
            "threads": scale.threads,
            "fresh_tokens": 10_000_000,
            "daily_minutes": _DAILY_MINUTES,
            "alarm_tokens": scale.alarm_tokens,
            "alarm_fall": scale.alarm_fall,
            "run_tokens": scale.run_tokens,
            "dataset_options": json.dumps(scale.dataset),
            "training_options": json.dumps(scale.training | {"steps": scale.steps}),
            **scale.gate,
        }
        coordinator = {
            "recording_share": 1.0,
            "recording_prompts": "true",
            "canary_share": _CANARY_SHARE,
            "canary_bound": scale.canary_bound,
            "canary_alpha": scale.canary_alpha,
            "canary_window_s": scale.canary_s,
            "canary_session_samples": scale.session_samples,
        }
        verifier = {"traffic": traffic, "traffic_flush_s": scale.flush_s}
        parts = {"DISTILL": distill, "COORDINATOR": coordinator, "VERIFIER": verifier}
        return {
            f"OUTRIDER_{part}_{name.upper()}": str(value)
            for part, settings in parts.items()
            for name, value in settings.items()
        }


def _trains(pid: int) -> bool:
    return _TRAINER in Path(f"/proc/{pid}/cmdline").read_bytes()


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _program() -> list[str]:
    return [sys.executable, "-c", "from cloud_verifier.distill.cli import main; main()"]
