"""Provide fakes around the loop: a coordinator, a traffic log, and stages that write the files of real ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import tiny_drafts

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.dataset import DatasetCard
from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publisher import Publisher
from cloud_verifier.distill.run_folder import RunFolder, StageFailed
from cloud_verifier.distill.stages import STAGES, StageFunction
from cloud_verifier.traffic.passage import Passage
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, Unavailable
from outrider.wire.manifest import name_of, read_unverified, verify
from outrider.wire.ticket import Signer, Target
from outrider.wire.v1 import coordinator_pb2 as pb

CANARY, CANDIDATE, STABLE = pb.RELEASE_STATE_CANARY, pb.RELEASE_STATE_CANDIDATE, pb.RELEASE_STATE_STABLE
_T = TypeVar("_T")
TARGET = Target("", "sha256:weights", "sha256:tokens")
SIGNER = Signer.generate()


class FakeReleases:
    """Act as a coordinator with a store that can be lost, and a canary that ends when the test says so."""

    def __init__(self) -> None:
        self.known: dict[str, pb.Release] = {}
        """By digest."""
        self.published: list[bytes] = []
        """Every manifest that it received and did not know."""
        self.away = False

    async def list(self) -> Sequence[pb.Release]:
        self._answer()
        return sorted(self.known.values(), key=lambda known: -known.version)

    async def publish(self, manifest: bytes) -> pb.Release:
        self._answer()
        read = verify(manifest, {SIGNER.key_id: SIGNER.public_key})
        name = name_of(read)
        if name not in self.known:
            if any(version >= read.version for version in self.states):
                raise BadRequest(f"version {read.version} is not the newest")
            self.published.append(manifest)
            busy = CANARY in self.states.values()
            state = CANDIDATE if busy else CANARY
            self.known[name] = pb.Release(manifest=manifest, state=state, version=read.version, name=name)
        return self.known[name]

    def decide_all(self, state: pb.ReleaseState) -> None:
        """Decide about the releases on trial. One that becomes stable takes the place of the one that was."""
        for known in self.known.values():
            if known.state in (CANDIDATE, CANARY):
                for other in self.known.values():
                    if state == other.state == STABLE:
                        other.state = pb.RELEASE_STATE_SUPERSEDED
                known.state = state

    @property
    def states(self) -> dict[int, int]:
        return {known.version: known.state for known in self.known.values()}

    @property
    def versions(self) -> Sequence[int]:
        return [read_unverified(raw).version for raw in self.published]

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("the coordinator is away")


def passage(session: str, count: int, name: str, time: float, **more: Any) -> Passage:
    """Return a passage of `count` tokens."""
    more = {"weights_hash": TARGET.weights_hash, "start": 0, "top": 1, **more}
    return tiny_drafts.passage(session, tokens=[0] * count, traffic_class=name, time_unix=time, **more)


class FakeLog(tiny_drafts.ListedLog):
    """Hold a traffic log in memory that nothing expires in."""

    def tidy(self) -> None:
        pass


class FakeStages:
    """Run stages that take no time. `fails`: stage -> errors that it raises first."""

    def __init__(self, *, passes: bool = True) -> None:
        self.passes = passes
        self.sessions = 8
        self.begun: list[str] = []
        self.fails: dict[str, list[StageFailed]] = {}

    def run(self, stage: str, run: RunFolder) -> None:
        self.begun.append(stage)
        if self.fails.get(stage):
            raise self.fails[stage].pop(0)
        write_stage(stage, run.path, passes=self.passes, sessions=self.sessions)


def write_stage(stage: str, folder: Path, *, passes: bool = True, sessions: int = 8) -> None:
    """Write the files that a stage writes."""
    if stage == "dataset":
        (folder / "dataset").mkdir(exist_ok=True)
        (folder / "dataset" / "card.json").write_text(card(1e12, sessions))
    elif stage == "training":
        (folder / "model").mkdir(exist_ok=True)
        (folder / "done.json").write_text("{}")
    elif stage == "export":
        (folder / "draft.gguf").write_bytes(b"GGUF" + folder.name.encode())
        (folder / "export.json").write_text('{"quantization": "Q8_0"}')
    else:
        verdict = {"passed": passes, "reasons": [] if passes else ["too weak"], "metrics": {"gain": 0.5}}
        (folder / "gate.json").write_text(json.dumps(verdict))


def card(expires_unix: float, sessions: int = 8) -> str:
    """Return the JSON of the card of a dataset that holds so many sessions of sums out."""
    return DatasetCard(
        expires_unix=expires_unix, fresh=("sums",), train_tokens=1, heldout_sessions={"sums": sessions}
    ).model_dump_json()


@dataclass
class World:
    """Hold a folder, and everything around the loop that outlives it."""

    folder: Path
    releases: FakeReleases = field(default_factory=FakeReleases)
    log: FakeLog = field(default_factory=lambda: FakeLog([]))
    stages: FakeStages = field(default_factory=FakeStages)
    now: float = 1_000.0
    settings: dict[str, Any] = field(default_factory=dict)
    target: Target = TARGET

    def __post_init__(self) -> None:
        (self.folder / "narrow.gguf").write_bytes(b"GGUF narrow")
        (self.folder / "target").mkdir(exist_ok=True)

    @property
    def config(self) -> DistillConfig:
        settings = {
            "traffic": str(self.folder / "traffic"),
            "target": self.folder / "target",
            "draft": self.folder / "narrow.gguf",
            "artifacts": self.folder / "artifacts",
            "state_dir": self.folder / "state",
            "fresh_tokens": 1_000,
        }
        return DistillConfig(**{**settings, **self.settings})

    def publisher(self) -> Publisher | None:
        artifacts = ArtifactStore(self.folder / "artifacts", ".gguf")
        ledger = self.folder / "state" / "releases"
        return Publisher(self.releases, ledger, artifacts, SIGNER, self.target, lambda: self.now)  # type: ignore[arg-type]

    def loop(self) -> DistillLoop:
        """Return a loop as it is after a start."""

        def stage(name: str) -> StageFunction:
            return lambda config, run, stop: self.stages.run(name, run)

        return DistillLoop(
            self.config,
            self.target,
            self.publisher(),
            self.log,  # type: ignore[arg-type]
            stages={name: stage(name) for name in STAGES},
            clock=lambda: self.now,
        )

    @property
    def runs(self) -> Path:
        return self.config.runs

    def run(self, number: int = 1) -> RunFolder:
        return RunFolder(self.runs / str(number))

    def traffic(self, tokens: int, name: str = "sums", **more: Any) -> None:
        """Record new traffic, a second after the last."""
        self.now += 1
        session = f"session-{len(self.log.passages)}"
        self.log.passages.append(passage(session, tokens, name, self.now, **more))


class Killed(BaseException):
    """Stand for a kill, which no handler of errors may catch."""


def killed_at(line: int, modules: Sequence[ModuleType], work: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
    """Run a coroutine and kill it before the n-th line that it executes in these modules, counted from 0.

    None where it was killed. What cleans up after exceptions still runs, as it would not after SIGKILL.
    """
    import asyncio

    files = {module.__file__ for module in modules}
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            passed += 1
            if passed > line:
                sys.settrace(None)
                raise Killed
        return trace

    async def traced() -> _T:
        sys.settrace(trace)
        try:
            return await work()
        finally:
            sys.settrace(None)

    try:
        return asyncio.run(traced())
    except Killed:
        return None
