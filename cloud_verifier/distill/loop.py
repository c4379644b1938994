"""Run the distillation loop: watch -> dataset -> training -> export -> gate -> publish -> canary -> watch.

What comes next follows from the files of the runs' folders (`run_folder`) and from the traffic log; each step is
idempotent and writes its result last. If the loop, a stage, the coordinator or the coordinator's store is killed, the
next step resumes what was not finished. A run that failed, or whose draft the gate or the canary refused, has used up
its traffic: only newer traffic starts another run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from cloud_verifier.distill.config import STAGE_MINUTES, TRAIN_MINUTES, DistillConfig
from cloud_verifier.distill.data.plan import DatasetCard
from cloud_verifier.distill.data.traffic_counts import (
    TrafficCounter,
    alarms,
    total_tokens,
    training_due,
    updated_usual,
)
from cloud_verifier.distill.errors import StageFailed
from cloud_verifier.distill.publishing.heads import HeadsPublisher
from cloud_verifier.distill.publishing.publisher import Publisher
from cloud_verifier.distill.publishing.release_client import CANDIDATE, DECIDED, ROLLED_BACK, STABLE, ReleaseRecord
from cloud_verifier.distill.run_folder import (
    DATASET,
    EXPORT,
    MODEL,
    OUTCOME,
    RELEASE,
    VERDICT,
    Job,
    Result,
    RunFolder,
    Stage,
    all_runs,
)
from outrider.artifacts.store import ArtifactStore, file_digest
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, ModelRefused, Unavailable

log = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds between two readings of the traffic log, or of the canary's state."""
TIDY_S = 3_600.0
"""Seconds between two deletions of what has expired in the traffic log."""
RETRY_S, RETRY_MAX_S = 30.0, 3_600.0
"""Seconds until a failed stage is tried again: at first, doubling, and at most."""
ATTEMPTS = 5
"""Attempts of one stage, after which the run is given up, and its traffic with it."""
KEEP_RUNS = 3
"""Past runs whose models and logs are kept."""
MORE_TRAFFIC = 1.5
"""Multiple of the traffic of a run that came too early at which the next one begins."""
_OWN_ERRORS = (BadRequest, ModelRefused, FileNotFoundError, ValueError)
"""Errors that lie with the draft, the publisher or a damaged file, and will not pass by themselves."""

StageRunner = Callable[[str, Path, float, int], Awaitable[None]]
"""Runs a stage, given its name, the run's folder, a limit in seconds and the number of threads (`stages.run_stage`)."""


class DistillLoop:
    """Runs the loop step by step. Only one process at a time may use a state directory."""

    def __init__(
        self,
        config: DistillConfig,
        stage_runner: StageRunner,
        publisher: Publisher | HeadsPublisher,
        counter: TrafficCounter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises OSError if the configured draft cannot be read."""
        self._config = config
        self._stage_runner = stage_runner
        self._publisher = publisher
        self._counter = counter
        self._clock = clock
        self._artifacts = ArtifactStore(config.artifacts, config.suffix)
        self._first_draft = file_digest(config.draft) if config.draft.is_file() else ""
        self._tidied = float("-inf")
        self._alarms: set[str] = set()
        """Classes whose acceptance has fallen, with too little traffic to learn from so far."""
        self._wanted = 0
        """Tokens below which no run begins: the last dataset had too little to measure on."""
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
        """Return the run that is under way."""
        return next((run for run in self.runs[-1:] if run.stage is not None), None)

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
        job, target = run.job, self._publisher.target
        if (job.weights_hash, job.tokenizer_hash) != (target.weights_hash, target.tokenizer_hash):
            served = f"served is {target.weights_hash}"
            self._end(run, "failed", f"for target {job.weights_hash}, tokenizer {job.tokenizer_hash}; {served}")
            return 0.0
        self._drop_expired(run)
        stage = run.stage
        if stage == "canary":
            return await self._await_canary(run)
        if stage == "publish":
            await self._publish(run)
        elif stage is not None:
            await self._run_stage(run, stage)
        run.worked()
        return 0.0

    # --- before a run

    async def _watch(self) -> bool:
        """Return whether there is something to do at once: a run has begun, or releases were published again."""
        known = await self._publisher.known()
        if restored := await self._publisher.restore(known):
            log.info("published again: %s", ", ".join(digest[:12] for digest in restored))
            return True
        last = self.runs[-1].job if self.runs else None
        usual, used_unix = (last.usual, last.newest_unix) if last else ({}, 0.0)
        used_unix = min(used_unix, self._clock())  # a verifier's clock may have been ahead
        incumbent = self._incumbent(known)
        traffic, newest_unix = await asyncio.to_thread(self._counter.count, used_unix, incumbent)
        if self._clock() - self._tidied >= TIDY_S:
            self._tidied = self._clock()
            await asyncio.to_thread(self._counter.log.tidy)
        self._note_alarms(alarms(traffic, usual))
        cause, tokens = training_due(traffic, usual, self._config.fresh_tokens), total_tokens(traffic)
        if cause is None or tokens < self._wanted:
            return False
        reason, fresh = cause
        self._begin(
            incumbent,
            used_unix,
            cause=reason,
            fresh=fresh,
            tokens=tokens,
            newest_unix=newest_unix,
            usual=updated_usual(traffic, usual),
        )
        return True

    def _note_alarms(self, found: Mapping[str, str]) -> None:
        """Log each class whose acceptance has fallen, once."""
        for name in found.keys() - self._alarms:
            log.info("%s: a run begins once there are enough tokens of it", found[name])
        self._alarms = set(found)

    def _incumbent(self, known: Mapping[str, ReleaseRecord]) -> str:
        """Return the digest of the newest stable release whose file is here, or else of the configured draft."""
        for one in sorted(known.values(), key=lambda one: -one.manifest.version):
            if one.state == STABLE and self._artifacts.path(one.digest).is_file():
                return one.digest
        return self._first_draft

    def _begin(self, parent: str, used_unix: float, *, fresh: tuple[str, ...], **seen: Any) -> None:
        """Begin a run from the release `parent`. seen: what the run's job says of its traffic."""
        config, target, runs = self._config, self._publisher.target, self.runs
        released = self._artifacts.path(parent)
        incumbent = released if parent and released.is_file() else config.draft
        # The model that a release was quantized from is better to go on from, as long as its run's folder is kept.
        models = [run.path / MODEL for run in runs if run.release == parent and (run.path / MODEL).is_dir()]
        base = models[-1] if parent and models and not config.heads else incumbent
        dataset_plan: dict[str, Any] = {
            "weights_hash": target.weights_hash,
            "fresh_since_unix": used_unix,
            "named": fresh,
            **config.dataset_options,
            # For the stages that need it, those between, and one wait for a retry.
            "lasts_s": config.training_s + 4 * 60 * STAGE_MINUTES + RETRY_S,
        }
        number = runs[-1].number + 1 if runs else 1
        job = Job(
            fresh=fresh,
            **seen,
            heads=config.heads,
            traffic=config.traffic,
            dataset=dataset_plan,
            target=config.target.resolve(),
            weights_hash=target.weights_hash,
            tokenizer_hash=target.tokenizer_hash,
            base=base.resolve(),
            incumbent=incumbent.resolve(),
            parent=parent,
            rule=config.gate_rule,
            threads=int(config.training_options.get("threads", 1)),
        )
        training_plan: dict[str, Any] = {
            "base": str(job.base),
            "tokenizer": str(job.target),
            "dataset": str((config.runs / str(number) / DATASET).resolve()),
            **({} if "steps" in config.training_options else {"minutes": TRAIN_MINUTES}),
            **({"heads": {}} if config.heads else {}),
            **config.training_options,
        }
        RunFolder.begin(config.runs, number, job, training_plan)
        self._wanted = 0
        log.info("run %d begins: %s; fresh classes %s", number, job.cause, ", ".join(map(repr, fresh)))

    # --- the stages of a run

    def _drop_expired(self, run: RunFolder) -> None:
        """Delete a dataset of which something expires before the stage that needs it ends: it is built again."""
        stage = run.stage
        needed_s = {"training": self._config.training_s, "gate": 60 * STAGE_MINUTES}.get(stage or "", 0.0)
        if stage != "dataset" and run.dataset.exists() and not run.dataset_lasts(self._clock() + needed_s):
            log.info("run %d: the dataset would expire during stage %s, and is deleted", run.number, stage)
            run.delete_dataset()

    async def _run_stage(self, run: RunFolder, stage: Stage) -> None:
        """Run a stage. Raises StageFailed."""
        log.info("run %d: %s", run.number, stage)
        begun = self._clock()
        limit_s = self._config.training_s if stage == "training" else 60 * STAGE_MINUTES
        try:
            await self._stage_runner(stage, run.path, limit_s, run.job.threads)
        finally:
            self.stage_s[stage] += self._clock() - begun
        if run.stage == stage:
            raise StageFailed(f"{stage}: ended without its result; see {stage}.log")
        if stage == "dataset":
            self._check_size(run)

    def _check_size(self, run: RunFolder) -> None:
        """Put a run off whose dataset has too few sessions for the gate: as if it had not begun, its traffic counts."""
        job, card = run.job, DatasetCard.read(run.dataset)
        sessions = sum(card.heldout_sessions.get(name, 0) for name in job.fresh)
        if sessions < job.rule.sessions:
            self._wanted = math.ceil(MORE_TRAFFIC * job.tokens)
            run.delete()
            log.info(
                "run %d is put off until there are %d fresh tokens: %d held-out sessions of the fresh classes, the gate"
                " needs %d",
                *(run.number, self._wanted, sessions, job.rule.sessions),
            )

    async def _publish(self, run: RunFolder) -> None:
        run.delete_dataset()
        job, verdict = run.job, run.read(VERDICT)
        if not verdict["passed"]:
            self._end(run, "refused", "; ".join(verdict["reasons"]))
            return
        quantization = run.read(EXPORT)["quantization"]
        file = run.path / job.artifact
        release = await self._publisher.publish(file, quantization, job.parent, verdict["metrics"])
        run.write(RELEASE, {"release": release.digest})

    async def _await_canary(self, run: RunFolder) -> float:
        """Return the seconds to wait: 0.0 if the canary is decided, or if its release has to be published again."""
        known = await self._publisher.known()
        if run.release not in known:  # the coordinator's store has lost it
            if run.release in await self._publisher.restore(known):
                return POLL_S
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
        ended = [*(one for one in self.runs if one.outcome is not None), run]
        stable = [one for one in ended if one.outcome is not None and one.outcome.result == "stable"]
        kept = {one.number for one in [*ended[-KEEP_RUNS:], *([] if result == "stable" else stable[-1:])]}
        for one in ended:
            if one.number not in kept:
                one.empty()
        run.write(OUTCOME, {"result": result, "reason": reason, "ended_unix": self._clock()})
        self.results[result] += 1
        log.info("run %d ended: %s%s", run.number, result, f" ({reason})" if reason else "")

    def _failed(self, error: Exception) -> float:
        """Record a failure of the present stage, or of watching if there is no run; return the seconds to wait.

        A run that fails again and again is given up; one that has passed the gate only for errors of its own.
        """
        self.failures += 1
        run = self.run
        if run is None:
            log.error("watching failed: %s", error)
            return POLL_S
        run.failed(str(error))
        passed = run.stage in ("publish", "canary")
        if run.failures >= ATTEMPTS and (not passed or isinstance(error, _OWN_ERRORS)):
            self._end(run, "failed", str(error))
            return 0.0
        wait_s = backoff_s(run.failures, RETRY_S, RETRY_MAX_S, jitter=0.0)
        log.error("run %d, failure %d, tried again in %.0f s: %s", run.number, run.failures, wait_s, error)
        return wait_s


def described(config: DistillConfig) -> str:
    """Say what the loop is at."""
    runs = all_runs(config.runs)
    under_way = next((f"run {run.number}: {run.job.cause} ({run.stage})" for run in runs[-1:] if run.stage), "")
    return under_way or f"watching, {len(runs)} runs so far"


def canary_result(known: Mapping[str, ReleaseRecord], digest: str) -> tuple[Result, str] | None:
    """Return the result of a release's canary and the reason; None while the coordinator has not decided.

    digest: names the release, which is among `known`, the target's releases by digest. One that is superseded was
    stable: a canary that a newer one replaces is rolled back.
    """
    release = known[digest]
    if release.state in DECIDED:
        return ("rolled_back" if release.state == ROLLED_BACK else "stable"), release.reason
    blocked = release.state == CANDIDATE and any(other.state == STABLE and other.pinned for other in known.values())
    if blocked or release.pinned:
        pinned = "the stable release" if blocked else "it"
        return "waiting", f"{pinned} is pinned: an operator decides what becomes of release {digest[:12]}"
    return None
