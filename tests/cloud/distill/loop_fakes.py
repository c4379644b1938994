"""Provide fakes around the loop: a coordinator, a traffic log, and stages that write the files of real ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import numpy as np
import tiny_drafts

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.plan import DatasetCard
from cloud_verifier.distill.data.traffic_counts import TrafficCounter
from cloud_verifier.distill.errors import StageFailed
from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publishing.publisher import Publisher, ReleaseLedger, TargetHashes
from cloud_verifier.distill.publishing.release_client import CANARY, CANDIDATE, STABLE, SUPERSEDED, ReleaseRecord
from cloud_verifier.distill.run_folder import RunFolder
from cloud_verifier.traffic.passage import Passage
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, Unavailable
from outrider.wire.manifest import read_unverified, verify
from outrider.wire.ticket import Signer

_T = TypeVar("_T")
TARGET = TargetHashes("sha256:weights", "sha256:tokens")
SIGNER = Signer.generate()


class FakeReleases:
    """Act as a coordinator with a store that can be lost, and a canary that ends when the test says so."""

    def __init__(self) -> None:
        self.known: dict[str, ReleaseRecord] = {}
        self.published: list[bytes] = []
        """Every manifest that it received and did not know."""
        self.away = False

    async def list(self) -> Sequence[ReleaseRecord]:
        self._answer()
        return sorted(self.known.values(), key=lambda known: -known.manifest.version)

    async def publish(self, raw: bytes) -> str:
        self._answer()
        manifest = verify(raw, {SIGNER.key_id: SIGNER.public_key})
        if manifest.digest not in self.known:
            if any(known.manifest.version >= manifest.version for known in self.known.values()):
                raise BadRequest(f"version {manifest.version} is not the newest")
            self.published.append(raw)
            busy = any(known.state == CANARY for known in self.known.values())
            self.known[manifest.digest] = ReleaseRecord(manifest, raw, CANDIDATE if busy else CANARY)
        return self.known[manifest.digest].state

    async def promote(self, digest: str) -> str:
        self._answer()
        known = self.known[digest]
        self.decide(digest, {CANDIDATE: CANARY, CANARY: STABLE}[known.state])
        return self.known[digest].state

    def decide(self, digest: str, state: str, reason: str = "") -> None:
        if state == STABLE:
            for known in list(self.known.values()):
                if known.state == STABLE:
                    self.known[known.digest] = ReleaseRecord(known.manifest, known.raw, SUPERSEDED)
        old = self.known[digest]
        self.known[digest] = ReleaseRecord(old.manifest, old.raw, state, reason)

    def decide_all(self, state: str) -> None:
        for known in list(self.known.values()):
            if known.state in (CANDIDATE, CANARY):
                self.decide(known.digest, state)

    @property
    def states(self) -> dict[int, str]:
        return {known.manifest.version: known.state for known in self.known.values()}

    @property
    def versions(self) -> list[int]:
        return [read_unverified(raw).version for raw in self.published]

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("the coordinator is away")


def passage(session: str, count: int, name: str, time: float, accepted: float = 1.0, **more: Any) -> Passage:
    """Return a passage. count: tokens, of which a device had proposed the share `accepted`."""
    depths = (np.arange(count) < accepted * count).astype(np.uint8)
    more = {"weights_hash": TARGET.weights_hash, "start": 0, "top": 1, **more}
    return tiny_drafts.passage(
        session, tokens=[0] * count, traffic_class=name, time_unix=time, proposed_depths=depths, **more
    )


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

    async def run(self, stage: str, folder: Path, limit_s: float, threads: int) -> None:
        self.begun.append(stage)
        if self.fails.get(stage):
            raise self.fails[stage].pop(0)
        write_stage(stage, folder, passes=self.passes, sessions=self.sessions)


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
        expires_unix=expires_unix,
        weights_hash=TARGET.weights_hash,
        train={},
        heldout={},
        heldout_sessions={"sums": sessions},
        left_out={},
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
    target: TargetHashes = TARGET

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

    def publisher(self) -> Publisher:
        ledger = ReleaseLedger(self.folder / "state" / "releases")
        artifacts = ArtifactStore(self.folder / "artifacts", ".gguf")
        return Publisher(self.releases, ledger, artifacts, SIGNER, self.target, lambda: self.now)

    def loop(self) -> DistillLoop:
        """Return a loop as it is after a start."""
        counter = TrafficCounter(self.log, TARGET.weights_hash, lambda: self.now, window=200)
        return DistillLoop(
            self.config, lambda *given: self.stages.run(*given), self.publisher(), counter, lambda: self.now
        )

    @property
    def runs(self) -> Path:
        return self.config.runs

    def run(self, number: int = 1) -> RunFolder:
        return RunFolder(self.runs / str(number))

    def traffic(self, tokens: int, name: str = "sums", accepted: float = 1.0, **more: Any) -> None:
        """Record new traffic, a second after the last."""
        self.now += 1
        session = f"session-{len(self.log.passages)}"
        self.log.passages.append(passage(session, tokens, name, self.now, accepted, **more))


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
