"""Run the distillation loop: watch -> dataset -> training -> export -> gate -> publish -> canary -> watch.

Each step is idempotent and then writes the new state. If the loop, a stage, the coordinator or the coordinator's store
is killed, the next step resumes what was not finished. A run that failed, or whose draft the evaluation gate or the
canary refused, has used up its traffic: only newer traffic starts another run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.traffic_counts import TrafficCounter
from cloud_verifier.distill.errors import StageFailed
from cloud_verifier.distill.publishing.heads import HeadsPublisher
from cloud_verifier.distill.publishing.publisher import Publisher
from cloud_verifier.distill.publishing.release_client import CANDIDATE, DECIDED, ROLLED_BACK, STABLE, ReleaseRecord
from cloud_verifier.distill.run_folder import Job, RunFolder, Stage, clean_up
from cloud_verifier.distill.state import LoopState, Result, RunOutcome, RunState
from cloud_verifier.distill.watcher import TrafficWatcher
from outrider.core.errors import Unavailable

log = logging.getLogger(__name__)


class DistillLoop:
    """Runs the loop step by step. Only one process at a time may use a state directory."""

    def __init__(
        self,
        config: DistillConfig,
        stage_runner: Callable[[str, Path], Awaitable[None]],
        publisher: Publisher | HeadsPublisher,
        counter: TrafficCounter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the loop's state. stage_runner: runs a stage, given its name and the run's folder; raises StageFailed.

        Raises BadRequest if the state on disk is damaged, and OSError if the configured draft cannot be read.
        """
        self._config = config
        self._stage_runner = stage_runner
        self._publisher = publisher
        self._watcher = TrafficWatcher(config, publisher, counter, clock)
        self._clock = clock
        self.state = LoopState.load(config.state)
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        """Stage -> seconds that it has taken since this process started."""
        self.results: Counter[str] = Counter()
        """Result -> number of runs that ended with it since this process started."""
        self.failures = 0
        """Number of failures of stages and of the watcher since this process started."""

    async def run(self) -> None:
        """Take steps until cancelled."""
        log.info("the loop continues: %s", self.state)
        while True:
            wait_s = await self.step()
            await asyncio.sleep(wait_s)

    async def once(self) -> RunOutcome | None:
        """Take steps until one has to wait, as for a canary, or until a run ends; return that run's outcome or None.

        Raises StageFailed or a core error if a step failed; the next call tries it again.
        """
        history = self.state.history[-1:]
        while await self.step(wait=False) == 0.0:
            if self.state.history[-1:] != history:
                return self.state.history[-1]
        return None

    async def step(self, *, wait: bool = True) -> float:
        """Take one step; return the seconds until the next one is worth taking, 0.0 if that is now.

        wait: log an error, and wait before the next try. Otherwise raise it, and try a failed stage again at once.
        """
        run, poll_s = self.state.run, self._config.poll_s
        if run is not None:
            self._drop_expired(run)
            if wait and (wait_s := run.not_before_unix - self._clock()) > 0:
                return min(wait_s, poll_s)
        try:
            new = await (self._watcher.watch(self.state) if run is None else self._continue(run))
            if new is None:
                return poll_s
            if new != self.state:
                self._set_state(new)
        except Unavailable as error:
            log.warning("the step is tried again in %.0f s: %s", poll_s, error)
            if not wait:
                raise
            return poll_s
        except Exception as error:  # the loop survives damaged files and file system errors, too
            self._record_failure(error)
            if not wait:
                raise
            return poll_s if self.state.run is None else 0.0
        return 0.0 if run is not None or new.run is not None else poll_s

    async def _continue(self, run: RunState) -> LoopState | None:
        """Do what the run's folder lacks next, and return the state that follows; None if the run has to wait."""
        folder, stage = self._folder(run), run.stage(self._config.runs)
        job, target = Job.read(folder.path), self._publisher.target
        if (job.weights_hash, job.tokenizer_hash) != (target.weights_hash, target.tokenizer_hash):
            reason = f"for target {job.weights_hash}, tokenizer {job.tokenizer_hash}; served is {target.weights_hash}"
            return self._ended(run, "failed", reason)
        if stage == "canary":
            return await self._await_canary(run)
        if stage != "publish":
            await self._run_stage(run, stage)
            return self.state.advanced(run)
        folder.delete_dataset()
        verdict = folder.verdict()
        if not verdict["passed"]:
            return self._ended(run, "refused", "; ".join(verdict["reasons"]))
        release = await self._publisher.publish(
            folder.path / job.artifact, job.quantization, run.incumbent, verdict["metrics"]
        )
        return self.state.advanced(run, release.digest)

    async def _await_canary(self, run: RunState) -> LoopState | None:
        known = await self._publisher.known()
        if run.release not in known:  # the coordinator's store has lost it
            return None if run.release in await self._publisher.restore(known) else self.state.advanced(run)
        decision = canary_result(known, run.release)
        return self._ended(run, *decision) if decision else None

    def _drop_expired(self, run: RunState) -> None:
        """Delete a dataset of which something expires before the stage that needs it ends: it is built again."""
        stage, folder = run.stage(self._config.runs), self._folder(run)
        needed_s = {"training": self._config.training_s, "gate": 60 * self._config.stage_minutes}.get(stage, 0.0)
        if stage != "dataset" and folder.dataset.exists() and not folder.dataset_lasts(self._clock() + needed_s):
            log.info("run %d: the dataset would expire during stage %s, and is deleted", run.number, stage)
            folder.delete_dataset()

    async def _run_stage(self, run: RunState, stage: Stage) -> None:
        """Run a stage, and record its duration even if it fails. Raises StageFailed."""
        log.info("run %d: %s", run.number, stage)
        started = self._clock()
        folder = self._folder(run)
        try:
            await self._stage_runner(stage, folder.path)
        finally:
            seconds = self._clock() - started
            self.stage_s[stage] += seconds
            self._set_state(self.state.with_stage_time(seconds, self._clock()))
        if folder.next_stage == stage:
            raise StageFailed(f"{stage}: ended without its result; see {stage}.log")

    def _ended(self, run: RunState, result: Result, reason: str) -> LoopState:
        return self.state.ended(run, result, reason, self._clock(), self._config)

    def _record_failure(self, error: Exception) -> None:
        """Record a failure of the current stage, or of the watcher if there is no run."""
        self.failures += 1
        run = self.state.run
        if run is None:
            log.error("watching failed: %s", error)
            return
        new = self.state.failed(run, error, self._clock(), self._config)
        if new.run is not None:
            wait_s = new.run.not_before_unix - self._clock()
            log.error("run %d, failure %d, tried again in %.0f s: %s", run.number, new.run.failures, wait_s, error)
        elif new.history == self.state.history:
            log.info("run %d is put off until there are %d fresh tokens: %s", run.number, new.wanted, error)
        self._set_state(new)

    def _set_state(self, new: LoopState) -> None:
        """Write the new state to disk. If a run has ended, log its outcome and delete the folders of old runs."""
        old = self.state
        if old.run is not None and new.run is None:  # first: after a kill between the two, nobody would delete them
            stable = next((past.number for past in reversed(new.history) if past.result == "stable"), None)
            clean_up(self._config.runs, new.last - self._config.keep_runs + 1, stable)
        new.save(self._config.state)
        self.state = new
        if new.history != old.history:
            outcome = new.history[-1]
            self.results[outcome.result] += 1
            reason = f" ({outcome.reason})" if outcome.reason else ""
            log.info("run %d ended: %s%s", outcome.number, outcome.result, reason)

    def _folder(self, run: RunState) -> RunFolder:
        return RunFolder(self._config.runs, run.number)


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
