"""Run the distillation loop: watch -> dataset -> training -> export -> gate -> publish -> canary -> watch.

Each step does one thing that can be done twice without harm, and then writes the new state. Whatever is killed, the
loop, a stage, the coordinator or its store, the next step takes up what was not finished. A run that failed, or whose
draft the gate or the canary refused, has used up its traffic all the same: only newer traffic begins another.
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
from cloud_verifier.distill.publishing.publisher import Publisher
from cloud_verifier.distill.publishing.release_client import CANDIDATE, DECIDED, ROLLED_BACK, STABLE, ReleaseRecord
from cloud_verifier.distill.run_folder import DONE, Job, RunFolder, clean_up
from cloud_verifier.distill.state import LoopState, Result, RunOutcome, RunState
from cloud_verifier.distill.watcher import TrafficWatcher
from outrider.core.errors import Unavailable

log = logging.getLogger(__name__)


class DistillLoop:
    """Takes the loop's steps. One process at a time owns a state directory."""

    def __init__(
        self,
        config: DistillConfig,
        run_stage: Callable[[str, Path], Awaitable[None]],
        publisher: Publisher,
        counter: TrafficCounter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """run_stage: runs a stage, given its name and the run's folder; raises StageFailed.

        Raises BadRequest if the state on disk is damaged, and OSError if the configured draft cannot be read.
        """
        self._config = config
        self._stage_runner = run_stage
        self._publisher = publisher
        self._watcher = TrafficWatcher(config, publisher, counter, clock)
        self._clock = clock
        self._runs = config.state / "runs"
        self.state = LoopState.load(config.state)
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that each stage has taken since this process began."""
        self.results: Counter[str] = Counter()
        """Number of runs that ended since this process began, by result."""
        self.failures = 0
        """Number of failures of stages and of watching since this process began."""

    async def run(self) -> None:
        """Take steps until cancelled."""
        log.info("the loop goes on: %s", self.state)
        while True:
            wait_s = await self.step()
            await asyncio.sleep(wait_s)

    async def once(self) -> RunOutcome | None:
        """Do what can be done now: at most one run, up to its canary or its end. Returns its outcome if it ended.

        Raises StageFailed or a core error if something failed; the next call tries that again.
        """
        history = self.state.history[-1:]
        while await self.step(wait=False) == 0.0:
            if self.state.history[-1:] != history:
                return self.state.history[-1]
        return None

    async def step(self, *, wait: bool = True) -> float:
        """Do the next thing; return the seconds after which there may be more to do.

        wait: errors are logged and tried again later. Otherwise they are raised, and a failed stage is tried at once.
        """
        run, poll_s = self.state.run, self._config.poll_s
        if run is not None:
            folder = self._folder(run)
            if folder.has_dataset and not folder.dataset_lasts(self._clock()):
                folder.delete_dataset()  # even while something is waited for
            if wait and (wait_s := run.not_before_unix - self._clock()) > 0:
                return min(wait_s, poll_s)
        try:
            new = await (self._watcher.watch(self.state) if run is None else self._continue(run))
        except Unavailable as error:
            log.warning("tried again in %.0f s: %s", poll_s, error)
            if not wait:
                raise
            return poll_s
        except Exception as error:  # the loop outlives damaged files and errors of file systems, too
            self._fail(error)
            if not wait:
                raise
            return poll_s if self.state.run is None else 0.0
        if new is None or new == self.state:
            return poll_s
        self._enter(new)
        return poll_s if new.run == run else 0.0

    async def _continue(self, run: RunState) -> LoopState | None:
        """Return the state after the run's stage; None if there is nothing to do but wait."""
        job, target = Job.read(self._folder(run).path), self._publisher.target
        if (job.weights_hash, job.tokenizer_hash) != (target.weights_hash, target.tokenizer_hash):
            reason = f"it was for target {job.weights_hash}, tokens {job.tokenizer_hash}; served: {target.weights_hash}"
            return self._ended(run, "failed", reason)
        match run.stage:
            case "training":
                return await self._train(run)
            case "gate":
                return await self._judge(run)
            case "publish":
                return await self._publish(run)
            case "canary":
                return await self._await_canary(run)
        if run.stage == "export" or not self._folder(run).has_dataset:
            await self._run_stage(run)
        return self.state.advanced(run)

    async def _train(self, run: RunState) -> LoopState:
        folder = self._folder(run)
        if not folder.has_model:
            if not folder.dataset_lasts(self._clock() + self._config.training_s):
                return self._build_again(run)
            await self._run_stage(run)
            if not folder.has_model:
                raise StageFailed(f"training: ended without {DONE}; see training.log")
        return self.state.advanced(run)

    async def _judge(self, run: RunState) -> LoopState:
        folder = self._folder(run)
        if not folder.dataset_lasts(self._clock() + 60 * self._config.stage_minutes):
            return self._build_again(run)
        await self._run_stage(run)
        verdict = folder.verdict()
        for note in verdict.get("notes", ()):
            log.warning("run %d, gate: %s", run.number, note)
        if not verdict["passed"]:
            return self._ended(run, "refused", "; ".join(verdict["reasons"]))
        return self.state.advanced(run)

    async def _publish(self, run: RunState) -> LoopState:
        folder = self._folder(run)
        folder.delete_dataset()
        release = await self._publisher.publish(
            folder.draft, Job.read(folder.path).quantization, run.incumbent, folder.verdict()["metrics"]
        )
        return self.state.advanced(run, release=release.digest)

    async def _await_canary(self, run: RunState) -> LoopState | None:
        known = await self._publisher.known()
        if run.release not in known:
            if run.release not in await self._publisher.restore(known):
                self._enter(self.state.advanced(run, to="publish"))
            return None
        found = canary_result(known, run.release)
        return self._ended(run, *found) if found else None

    def _build_again(self, run: RunState) -> LoopState:
        """Return to the dataset, which is built without what has expired. A finished training is not repeated."""
        log.info("run %d: the dataset expires before %s would end, and is built again", run.number, run.stage)
        self._folder(run).delete_dataset()
        return self.state.advanced(run, to="dataset")

    async def _run_stage(self, run: RunState) -> None:
        """Run the run's stage, and record the time that it took, however it ended. Raises StageFailed."""
        log.info("run %d: %s", run.number, run.stage)
        began = self._clock()
        try:
            await self._stage_runner(run.stage, self._folder(run).path)
        finally:
            seconds = self._clock() - began
            self.stage_s[run.stage] += seconds
            self._enter(self.state.with_stage_time(seconds, self._clock()))

    def _ended(self, run: RunState, result: Result, reason: str) -> LoopState:
        return self.state.ended(run, result, reason, self._clock(), self._config)

    def _fail(self, error: Exception) -> None:
        """Record a failure of the run's stage, or of watching."""
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
        self._enter(new)

    def _enter(self, new: LoopState) -> None:
        """Write the new state; after the end of a run, log its outcome and delete what is not kept."""
        old = self.state
        new.save(self._config.state)
        self.state = new
        if new.history != old.history:
            outcome = new.history[-1]
            self.results[outcome.result] += 1
            reason = f" ({outcome.reason})" if outcome.reason else ""
            log.info("run %d ends: %s%s", outcome.number, outcome.result, reason)
        if old.run is not None and new.run is None:
            stable = next((one.number for one in reversed(new.history) if one.result == "stable"), None)
            clean_up(self._runs, new.last - self._config.keep_runs + 1, stable)

    def _folder(self, run: RunState) -> RunFolder:
        return RunFolder(self._runs, run.number)


def canary_result(known: Mapping[str, ReleaseRecord], digest: str) -> tuple[Result, str] | None:
    """Return what came of a release, and the reason; None as long as the coordinator has not decided.

    known: the target's releases by digest, the release among them.
    """
    release = known[digest]
    if release.state in DECIDED:
        return ("rolled_back" if release.state == ROLLED_BACK else "stable"), release.reason
    blocked = release.state == CANDIDATE and any(one.state == STABLE and one.pinned for one in known.values())
    if blocked or release.pinned:
        pinned = "the stable release" if blocked else "it"
        return "waiting", f"{pinned} is pinned: an operator decides what becomes of release {digest[:12]}"
    return None
