"""Run the distillation loop: watch -> dataset -> training -> export -> gate -> publish -> canary -> watch.

What comes next follows from the files of the runs' folders (`run_folder`) and from the traffic log; each step is
idempotent and writes its result last. If the loop, the coordinator or the coordinator's store is killed, the next step
resumes what was not finished. Whatever comes of a run, it has used up its traffic: only newer traffic starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.dataset import DatasetCard
from cloud_verifier.distill.publisher import SERVED, Publisher, ReleaseClient, serve_heads
from cloud_verifier.distill.run_folder import (
    DRAFT,
    EXPORT,
    HEADS,
    MODEL,
    OUTCOME,
    RELEASE,
    VERDICT,
    Job,
    Result,
    RunFolder,
    Stage,
    StageFailed,
    all_runs,
)
from cloud_verifier.distill.stages import STAGES, StageFunction, dataset_plan, training_plan
from cloud_verifier.traffic.log import TrafficLog
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore, file_digest
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.core.vocabulary import token_table, vocabulary_hash
from outrider.wire.ticket import Signer, Target
from outrider.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds between two readings of the traffic log, or of the canary's state."""
TIDY_S = 3_600.0
"""Seconds between two deletions of what has expired in the traffic log."""
LATE_S = 300.0
"""Seconds by which a passage may arrive after newer ones, since a verifier writes them in turns."""
RETRY_S, RETRY_MAX_S = 30.0, 3_600.0
"""Seconds until a failed stage is tried again: at first, doubling, and at most."""
ATTEMPTS = 5
"""Attempts of one stage, after which the run is given up, and its traffic with it."""
CRASHES = 3
"""Processes in a row that may end in the middle of one stage, after which the run is given up, too."""
KEEP_RUNS = 3
"""Past runs whose models are kept."""


class DistillLoop:
    """Runs the loop step by step. Only one process at a time may use a state directory."""

    def __init__(
        self,
        config: DistillConfig,
        target: Target,
        publisher: Publisher | None,
        traffic: TrafficLog,
        *,
        stages: Mapping[str, StageFunction] = STAGES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """publisher: None for heads. Raises OSError if the configured draft cannot be read."""
        self._config = config
        self._target = target
        self._publisher = publisher
        self._traffic = traffic
        self._stages = stages
        self._clock = clock
        self._artifacts = ArtifactStore(config.artifacts, ".gguf")
        self._tidied = float("-inf")
        self._since_unix = self._newest_unix = 0.0
        self._fresh = 0
        """Tokens that were recorded after `_since_unix`."""
        self._ends: dict[str, int] = {}
        """Session id -> position up to which its tokens are counted."""
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        """Stage -> seconds that it has taken since this process started."""
        self.results: Counter[str] = Counter()
        """Result -> number of runs that ended with it since this process started."""
        self.failures = 0
        """Number of failures of stages and of watching since this process started."""

    @property
    def runs(self) -> list[RunFolder]:
        """Return all runs, the oldest first."""
        return all_runs(self._config.runs)

    @property
    def run(self) -> RunFolder | None:
        runs = self.runs
        return runs[-1] if runs and runs[-1].stage is not None else None

    async def run_forever(self) -> None:
        """Take steps until cancelled."""
        log.info("the loop continues: %s", described(self._config))
        while True:
            try:
                wait_s = await self.step()
            except Unavailable as error:
                wait_s = POLL_S
                log.warning("the step is tried again in %.0f s: %s", wait_s, error)
            except Exception as error:  # the loop survives damaged files and file system errors, too
                wait_s = self._failed(error)
            await asyncio.sleep(wait_s)

    async def once(self) -> RunFolder | None:
        """Take steps until one has to wait, as for a canary, or until a run ends; return that run, or None.

        Raises StageFailed or a core error if a step failed; the next call tries it again.
        """
        while True:
            run = self.run
            try:
                wait_s = await self.step()
            except Unavailable:
                raise
            except Exception as error:
                self._failed(error)
                raise
            if run is not None and run.outcome is not None:
                return run
            if wait_s:
                return None

    async def step(self) -> float:
        """Take one step; return the seconds until the next one is worth taking, 0.0 if that is now."""
        run = self.run
        if run is None:
            return 0.0 if await self._watch() else POLL_S
        job, served = run.job, self._target
        if (job.weights_hash, job.tokenizer_hash) != served.weights:
            hashes = f"{job.weights_hash}, tokenizer {job.tokenizer_hash}"
            self._end(run, "failed", f"for target {hashes}; served is {served.weights_hash}")
            return 0.0
        if run.stage in ("training", "export", "gate") and DatasetCard.read(run.dataset).expires_unix <= self._clock():
            log.info("run %d: something in the dataset has expired; it is deleted, and built again", run.number)
            run.delete_dataset()
        match run.stage:
            case "canary":
                return await self._await_canary(run)
            case "publish":
                await self._publish(run)
            case "dataset" | "training" | "export" | "gate" as stage:
                await self._work(run, stage)
        run.worked()
        return 0.0

    async def _watch(self) -> bool:
        """Begin a run if there is enough fresh traffic; return whether that was so."""
        now = self._clock()
        if now - self._tidied >= TIDY_S:
            self._tidied = now
            await asyncio.to_thread(self._traffic.tidy)
        since_unix = min(self.runs[-1].job.newest_unix, now) if self.runs else 0.0
        tokens, newest_unix = await asyncio.to_thread(self._fresh_traffic, since_unix, now)
        if tokens < self._config.fresh_tokens:
            return False
        number = self.runs[-1].number + 1 if self.runs else 1
        parent, incumbent = await self._incumbent()
        # The model that a release was quantized from is better to go on from, as long as its run's folder is kept.
        models = [run.path / MODEL for run in self.runs if run.release == parent and (run.path / MODEL).is_dir()]
        job = Job(
            tokens=tokens,
            since_unix=since_unix,
            newest_unix=newest_unix,
            weights_hash=self._target.weights_hash,
            tokenizer_hash=self._target.tokenizer_hash,
            base=(models[-1] if models and not self._config.heads else incumbent).resolve(),
            incumbent=incumbent.resolve(),
            parent=parent,
        )
        RunFolder.begin(self._config.runs, number, job)
        log.info("run %d begins: %d fresh tokens", number, tokens)
        return True

    def _fresh_traffic(self, since_unix: float, now: float) -> tuple[int, float]:
        """Return how many tokens were recorded after `since_unix`, and the time of the newest.

        Each call reads only what may be new. A verifier's clock may be ahead: what it recorded is counted when its time
        has come.
        """
        if since_unix != self._since_unix:
            self._since_unix = self._newest_unix = since_unix
            self._fresh, self._ends = 0, {}
        for one in self._traffic.read(max(since_unix, self._newest_unix - LATE_S), now, whole=False):
            if since_unix < one.time_unix <= now and one.weights_hash == self._target.weights_hash:
                end = self._ends.get(one.session_id, 0)
                self._fresh += max(0, one.end - max(one.start, end))
                self._ends[one.session_id] = max(one.end, end)
                self._newest_unix = max(self._newest_unix, one.time_unix)
        return self._fresh, self._newest_unix

    async def _incumbent(self) -> tuple[str, Path]:
        """Return digest and file of what a new draft must beat.

        It is the newest stable release whose file is here, or else the configured draft. Of heads it is the file that
        is served, the configured one, or the target's folder, without a digest, for the first ones.
        """
        if self._publisher is None:
            served = self._config.artifacts.expanduser() / SERVED
            file = served.resolve() if served.is_file() else self._config.draft
        else:
            for digest, release in (await self._publisher.known()).items():
                if release.state == pb.RELEASE_STATE_STABLE and self._artifacts.path(digest).is_file():
                    return digest, self._artifacts.path(digest)
            file = self._config.draft
        return (file_digest(file) if file.is_file() else ""), file

    async def _work(self, run: RunFolder, stage: Stage) -> None:
        """Do a stage in a thread. Raises StageFailed. If this is cancelled, a training ends at once, and this returns
        when the thread has ended: until then no other process may use the state directory."""
        if run.crashes >= CRASHES:
            why = f"{stage}: {run.crashes} processes in a row ended in the middle of it, as when memory runs out"
            self._end(run, "failed", f"{why}; see what the system's log says of them")
            return
        log.info("run %d: %s", run.number, stage)
        begun, stop = self._clock(), threading.Event()
        with run.working():
            working = asyncio.create_task(asyncio.to_thread(self._stages[stage], self._config, run, stop.is_set))
            try:
                await asyncio.shield(working)
            finally:
                stop.set()
                await asyncio.gather(working, return_exceptions=True)
                self.stage_s[stage] += self._clock() - begun
        if run.stage == stage:
            raise StageFailed(f"{stage}: ended without its result")
        if stage == "dataset":
            card = DatasetCard.read(run.dataset)
            sessions = sum(card.heldout_sessions.get(name, 0) for name in card.fresh)
            if sessions < (needed := self._config.gate.sessions):
                self._end(run, "refused", f"{sessions} held-out sessions of the fresh classes, {needed} are needed")

    async def _publish(self, run: RunFolder) -> None:
        run.delete_dataset()
        job, verdict = run.job, run.read(VERDICT)
        if not verdict["passed"]:
            self._end(run, "refused", "; ".join(verdict["reasons"]))
        elif self._publisher is None:
            digest = serve_heads(run.path / HEADS, self._config.artifacts, job.weights_hash)
            run.write(RELEASE, {"release": digest})
        else:
            file, quantization = run.path / DRAFT, run.read(EXPORT)["quantization"]
            await self._publisher.publish(file, quantization, job.parent, verdict["metrics"])
            run.write(RELEASE, {"release": file_digest(file)})

    async def _await_canary(self, run: RunFolder) -> float:
        """Return the seconds to wait: 0.0 if the canary is decided, or if its release has to be published again."""
        if self._publisher is None:  # verifiers serve heads from now on
            self._end(run, "stable", "")
            return 0.0
        known = await self._publisher.known()
        if run.release not in known:  # the coordinator's store has lost it
            (run.path / RELEASE).unlink()
            return 0.0
        decision = canary_result(known, run.release)
        if decision is None:
            return POLL_S
        self._end(run, *decision)
        return 0.0

    def _end(self, run: RunFolder, result: Result, reason: str) -> None:
        """End a run. It has used up its traffic, whatever came of it."""
        run.delete_dataset()  # first: after a kill between the two, nobody would delete it
        outcomes = {one.number: one.outcome.result for one in self.runs if one.outcome is not None}
        outcomes[run.number] = result
        stable = [number for number, how in outcomes.items() if how == "stable"]
        kept = {*sorted(outcomes)[-KEEP_RUNS:], *stable[-1:]}
        for one in self.runs:
            if one.number not in kept:
                one.empty()
        run.write(OUTCOME, {"result": result, "reason": reason, "ended_unix": self._clock()})
        self.results[result] += 1
        log.info("run %d ended: %s%s", run.number, result, f" ({reason})" if reason else "")

    def _failed(self, error: Exception) -> float:
        """Record a failure of the present stage, or of watching if there is no run; return the seconds to wait.

        A run that fails again and again is given up.
        """
        self.failures += 1
        run = self.run
        if run is None:
            log.error("watching failed: %s", error)
            return POLL_S
        run.failed(str(error))
        if run.failures >= ATTEMPTS:
            self._end(run, "failed", str(error))
            return 0.0
        wait_s = backoff_s(run.failures, RETRY_S, RETRY_MAX_S, jitter=0.0)
        log.error("run %d, failure %d, tried again in %.0f s: %s", run.number, run.failures, wait_s, error)
        return wait_s


def described(config: DistillConfig) -> str:
    """Say what the loop is at."""
    runs = all_runs(config.runs)
    if runs and (stage := runs[-1].stage):
        return f"run {runs[-1].number}: {runs[-1].job.tokens} fresh tokens ({stage})"
    return f"watching, {len(runs)} runs so far"


def canary_result(known: Mapping[str, pb.Release], digest: str) -> tuple[Result, str] | None:
    """Return the result of a release's canary and the reason; None while the coordinator has not decided.

    digest: names the release, which is among `known`, the target's releases by digest. One that is superseded was
    stable: a canary that a newer one replaces is rolled back.
    """
    release = known[digest]
    if release.state == pb.RELEASE_STATE_ROLLED_BACK:
        return "rolled_back", release.reason
    if release.state in (pb.RELEASE_STATE_STABLE, pb.RELEASE_STATE_SUPERSEDED):
        return "stable", release.reason
    blocked = release.state == pb.RELEASE_STATE_CANDIDATE and any(
        other.state == pb.RELEASE_STATE_STABLE and other.pinned for other in known.values()
    )
    if blocked or release.pinned:
        pinned = "the stable release" if blocked else "it"
        return "waiting", f"{pinned} is pinned: an operator decides what becomes of release {digest[:12]}"
    return None


@contextlib.asynccontextmanager
async def distill_loop(config: DistillConfig) -> AsyncIterator[DistillLoop]:
    """Yield the loop, which has its state directory for itself. Raises core errors."""
    if not (config.draft.is_file() or config.heads):
        raise BadRequest(f"draft {config.draft} is not a file; give the GGUF that verifiers offer", field="draft")
    _check_options(config)
    with locked(config.state):
        hashes = await asyncio.to_thread(target_hashes, config.target)
        async with publishing(config, hashes) as publisher:
            yield DistillLoop(config, hashes, publisher, TrafficLog(config.traffic))


def _check_options(config: DistillConfig) -> None:
    """Raise BadRequest for a field of the plans that is wrong, so that it is found before a run begins."""
    try:
        dataset_plan(config)
        training_plan(config, config.draft, config.runs)
    except ValidationError as error:
        first, field = error.errors()[0], "training_options"
        raise BadRequest(f"{field}: {'.'.join(map(str, first['loc']))}: {first['msg']}", field=field) from error


@contextlib.asynccontextmanager
async def publishing(config: DistillConfig, target: Target) -> AsyncIterator[Publisher | None]:
    """Yield a publisher of a target's drafts; None if heads are trained. Raises BadRequest."""
    if config.heads:
        yield None
        return
    signer, artifacts = Signer.load(config.key), ArtifactStore(config.artifacts, ".gguf")
    async with ReleaseClient(config) as registry:
        yield Publisher(registry, config.state / "releases", artifacts, signer, target)


def target_hashes(target: Path) -> Target:
    """Return the target, without a name, that verifiers announce which serve this directory. Raises BadRequest if it is
    none."""
    from cloud_verifier.engine.weights import hash_of

    tokenizer = target / "tokenizer.json"
    if not tokenizer.is_file() or not any(target.glob("*.safetensors")):
        raise BadRequest(f"target {target} has no tokenizer.json or no *.safetensors", field="target")
    digest = vocabulary_hash(token_table(tokenizer.read_bytes()))
    return Target("", f"sha256:{hash_of(target)}", f"sha256:{digest.hex()}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a state directory until the body or the process ends, however that happens. Raises Overloaded."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = atomic_files.lock(folder / "lock")
    if lock is None:
        raise Overloaded(f"another outrider-distill works in {folder}; wait for it, or end it")
    with lock:
        yield
