"""The loop: watch -> dataset -> training -> export -> gate -> publish -> canary -> watch.

One step does one thing that can be done twice without harm, and then writes where the loop is. So whatever is killed,
the loop, a stage, the coordinator or its store, the next step takes up what was not finished. A run that failed, or
whose draft the gate or the canary refused, uses its traffic up all the same: only newer traffic begins another.
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

from cloud_verifier.distill import job
from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.retrain_trigger import Cause, adapted, alarms, due
from cloud_verifier.distill.data.traffic_counts import Look, TrafficWatch
from cloud_verifier.distill.job import Job
from cloud_verifier.distill.publishing.publisher import Draft, Publisher
from cloud_verifier.distill.publishing.release_client import CANDIDATE, DECIDED, ROLLED_BACK, STABLE, Known
from cloud_verifier.distill.run_folder import RunFolder, RunFolders
from cloud_verifier.distill.stage_processes import StageFailed, Stages
from cloud_verifier.distill.state import HISTORY, Outcome, Result, Run, State, StateFile
from outrider.artifacts.hashing import file_digest
from outrider.artifacts.store import ArtifactStore
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, ModelRefused, Unavailable

log = logging.getLogger(__name__)

DAY_S = 86_400.0
_KEPT_FOR_GOOD = ("publish", "canary")
"""Stages of a draft that passed the gate: it is not given up for what is wrong elsewhere."""
_OURS = (BadRequest, ModelRefused, FileNotFoundError, ValueError)
"""Errors that lie with the draft, the publisher or a torn file, and that waiting for others does not mend."""
_MORE = 1.5
"""Times the traffic of a run that was too early, until the next."""


class Loop:
    """Where it is, and how to take the next step. One process at a time owns a state directory."""

    def __init__(
        self,
        config: DistillConfig,
        stages: Stages,
        publisher: Publisher,
        watch: TrafficWatch,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._stages = stages
        self._publisher = publisher
        self._watch = watch
        self._clock = clock
        self._artifacts = ArtifactStore(config.artifacts, ".gguf")
        self._folders = RunFolders(config.state / "runs")
        self._file = StateFile(config.state)
        self._first = file_digest(config.draft)
        self._tidied = float("-inf")
        self._waiting: set[str] = set()
        """Classes that have fallen, of which there is too little to learn from so far."""
        self.state = self._file.load()
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that stages have taken since this process began, as are the next two."""
        self.results: Counter[str] = Counter()
        """Runs that have ended, by what came of them."""
        self.failures = 0
        """Of stages, and of watching."""
        self._steps: Mapping[str, Callable[[Run], Awaitable[float]]] = {
            "dataset": self._build_dataset,
            "training": self._train,
            "export": self._export,
            "gate": self._judge,
            "publish": self._publish,
            "canary": self._await_canary,
        }

    async def run(self) -> None:
        """Until cancelled."""
        log.info("the loop goes on: %s", self.where)
        while True:
            wait_s = await self.step()
            await asyncio.sleep(wait_s)

    async def once(self) -> Outcome | None:
        """What can be done now: at most one run, up to its canary or its end. None where nothing ended.

        Raises StageFailed or a core error for what failed; the next call tries again.
        """
        ended = self.state.history[-1:]
        while await self.step(patient=False) == 0.0:
            if self.state.history[-1:] != ended:
                return self.state.history[-1]
        return None

    async def step(self, *, patient: bool = True) -> float:
        """Do the next thing; returns the seconds after which there may be more to do, 0 for at once.

        patient: errors are logged and tried again later; else they are raised, and no failure is waited out.
        """
        run = self.state.run
        if run is not None and self._folder(run).has_dataset and not self._lasts(run, 0.0):
            self._folder(run).forget()  # whatever is waited for
        if run is not None and patient and (wait := run.not_before_unix - self._clock()) > 0:
            return min(wait, self._config.poll_s)
        try:
            if run is not None and (why := self._abandoned(run)):
                return self._end(run, "failed", why)
            return await (self._look() if run is None else self._steps[run.stage](run))
        except Unavailable as error:
            log.warning("tried again in %.0f s: %s", self._config.poll_s, error)
            if not patient:
                raise
            return self._config.poll_s
        except Exception as error:  # a torn file, a file system's own errors: the loop outlives them all
            self._failed(error)
            if not patient:
                raise
            return self._config.poll_s if self.state.run is None else 0.0

    @property
    def where(self) -> str:
        """In words."""
        run = self.state.run
        return f"run {run.number}, {run.stage}" if run else f"watching, {self.state.last} runs so far"

    # --- watching

    async def _look(self) -> float:
        known = await self._publisher.known()
        if restored := await self._publisher.restore(known):
            log.info("published again: %s", ", ".join(digest[:12] for digest in restored))
            return self._config.poll_s
        incumbent = self._incumbent(known)
        used = min(self.state.used_unix, self._clock())  # a clock may have been ahead
        look = await asyncio.to_thread(self._watch.look, used, incumbent)
        await self._tidy()
        cause = due(look.seen, self.state.usual, self._config.watch_rule)
        if cause is None:
            if not self._alarmed(look):  # what has fallen must not become usual while it waits
                self._learn_usual(look)
            return self._config.poll_s
        if sum(one.tokens for one in look.seen.values()) < self.state.wanted:
            return self._config.poll_s
        if (spent := self.spent_s) >= 60 * self._config.daily_minutes:
            log.info("%s, but the last day's stages took %.0f minutes, which is the budget", cause.text, spent / 60)
            return self._config.poll_s
        self._begin(cause, look, incumbent)
        return 0.0

    def _alarmed(self, look: Look) -> bool:
        """Whether a class has fallen and a run waits for more of it. Said once."""
        found = alarms(look.seen, self.state.usual, self._config.watch_rule)
        for name in found.keys() - self._waiting:
            log.info("%s: a run begins once there are %d tokens of it", found[name], self._config.run_tokens)
        self._waiting = set(found)
        return bool(found)

    def _incumbent(self, known: Mapping[str, Known]) -> str:
        """The stable release, as far as its file is here; before there is one, the configured draft."""
        for one in sorted(known.values(), key=lambda one: -one.manifest.version):
            if one.state == STABLE and self._artifacts.path(one.digest).is_file():
                return one.digest
        return self._first

    def _begin(self, cause: Cause, look: Look, incumbent: str) -> None:
        run = Run(
            number=self.state.last + 1,
            cause=cause.text,
            fresh=cause.fresh,
            incumbent=incumbent,
            newest_unix=look.newest_unix,
            seen=dict(look.seen),
        )
        folder, told = self._folder(run), self._job(run)
        folder.prepare(told, self._training_plan(told, folder))
        log.info("run %d begins: %s; fresh classes %s", run.number, cause.text, ", ".join(map(repr, cause.fresh)))
        self._save(run=run, last=run.number)

    def _job(self, run: Run) -> Job:
        config = self._config
        place = self._artifacts.path(run.incumbent)
        incumbent = place if place.is_file() else config.draft
        target = self._publisher.target
        plan = {
            "weights_hash": target.weights_hash,
            "fresh_since_unix": self.state.used_unix,
            "named": run.fresh,
            "seed": config.seed,
        }
        return Job(
            traffic=config.traffic,
            dataset=plan | config.dataset_options | {"lasts_s": config.lasts_s},
            target=config.target.resolve(),
            weights_hash=target.weights_hash,
            tokenizer_hash=target.tokenizer_hash,
            base=(self._model_of(run.incumbent) or incumbent).resolve(),
            incumbent=incumbent.resolve(),
            quantization=config.quantization,
            widened=config.widened,
            fresh=run.fresh,
            rule=config.rule,
            threads=config.threads,
        )

    def _model_of(self, digest: str) -> Path | None:
        """The model that a release was quantised from, as long as it is kept."""
        for outcome in reversed(self.state.history):
            model = self._folders.of(outcome.number).path / job.MODEL
            if outcome.release == digest and model.is_dir():
                return model
        return None

    def _training_plan(self, told: Job, folder: RunFolder) -> dict[str, Any]:
        config = self._config
        length = {} if "steps" in config.training_options else {"minutes": config.train_minutes}
        return {
            "base": str(told.base),
            "tokenizer": str(told.target),
            "dataset": str(folder.dataset.resolve()),
            "loss": config.loss,
            "lora_rank": config.lora_rank,
            "threads": config.threads,
            "seed": config.seed,
            **length,
            **config.training_options,
        }

    def _learn_usual(self, look: Look) -> None:
        new = adapted({}, look.seen, self._config.watch_rule)
        usual = {name: max(value, self.state.usual.get(name, 0.0)) for name, value in new.items()}
        if any(self.state.usual.get(name) != value for name, value in usual.items()):
            self._save(usual=self.state.usual | usual)

    async def _tidy(self) -> None:
        if self._clock() - self._tidied >= self._config.housekeeping_s:
            self._tidied = self._clock()
            await asyncio.to_thread(self._watch.tidy, self._clock())

    # --- a run

    async def _build_dataset(self, run: Run) -> float:
        if not self._folder(run).has_dataset:
            await self._stage(run)
        return self._go_on(run, "training")

    async def _train(self, run: Run) -> float:
        folder = self._folder(run)
        if not folder.trained:
            if not self._lasts(run, self._config.training_s):
                return self._build_again(run)
            await self._stage(run)
            if not folder.trained:
                raise StageFailed("training", f"ended without {job.DONE}; see training.log")
        return self._go_on(run, "export")

    async def _export(self, run: Run) -> float:
        await self._stage(run)
        return self._go_on(run, "gate")

    async def _judge(self, run: Run) -> float:
        if not self._lasts(run, 60 * self._config.stage_minutes):
            return self._build_again(run)
        await self._stage(run)
        verdict = self._folder(run).verdict()
        for note in verdict.get("notes", ()):
            log.warning("run %d, gate: %s", run.number, note)
        if verdict["passed"]:
            self._go_on(run, "publish")
            self._folder(run).forget()
            return 0.0
        return self._end(run, "refused", "; ".join(verdict["reasons"]))

    def _lasts(self, run: Run, seconds: float) -> bool:
        """Whether none of the run's dataset must be forgotten within so many seconds."""
        return self._folder(run).lasts(self._clock() + seconds)

    def _build_again(self, run: Run) -> float:
        """The dataset anew, without what has expired. Training that is done stays done."""
        log.info("run %d: the dataset expires before %s would end, and is built again", run.number, run.stage)
        self._folder(run).forget()
        return self._go_on(run, "dataset")

    def _abandoned(self, run: Run) -> str:
        """Why a run must not go on: its draft is for another target than the one that is served now. Else empty."""
        told, target = self._folder(run).told(), self._publisher.target
        if (told.weights_hash, told.tokenizer_hash) == (target.weights_hash, target.tokenizer_hash):
            return ""
        return f"it was for target {told.weights_hash}, tokens {told.tokenizer_hash}; served is {target.weights_hash}"

    async def _publish(self, run: Run) -> float:
        folder = self._folder(run)
        draft = Draft(folder.draft, folder.told().quantization, run.incumbent, folder.verdict()["metrics"])
        release = await self._publisher.publish(draft)
        return self._go_on(run.model_copy(update={"release": release.digest}), "canary")

    async def _await_canary(self, run: Run) -> float:
        known = await self._publisher.known()
        if run.release not in known:
            if run.release not in await self._publisher.restore(known):
                self._go_on(run, "publish")
            return self._config.poll_s
        release = known[run.release]
        if release.state not in DECIDED:
            blocked = release.state == CANDIDATE and any(one.state == STABLE and one.pinned for one in known.values())
            if blocked or release.pinned:
                which = "the stable release" if blocked else "it"
                return self._end(
                    run,
                    "waiting",
                    f"{which} is pinned: what comes of release {release.digest[:12]} is the operator's to say",
                )
            return self._config.poll_s
        result: Result = "rolled_back" if release.state == ROLLED_BACK else "stable"
        return self._end(run, result, release.reason)

    async def _stage(self, run: Run) -> None:
        """Run the run's stage, and note what it took, however it ended."""
        log.info("run %d: %s", run.number, run.stage)
        began = self._clock()
        try:
            await self._stages.run(run.stage, self._folder(run).path)
        finally:
            now = self._clock()
            self.stage_s[run.stage] += now - began
            recent = [(when, took) for when, took in self.state.spent if when > now - DAY_S]
            self._save(spent=(*recent, (now, now - began)))

    def _go_on(self, run: Run, stage: str) -> float:
        self._save(run=run.model_copy(update={"stage": stage, "failures": 0, "not_before_unix": 0.0}))
        return 0.0

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        run = self.state.run
        if run is None:
            log.error("watching failed: %s", error)
            return
        if isinstance(error, StageFailed) and error.early:
            self._postpone(run, error)
            return
        hopeless = isinstance(error, StageFailed) and error.hopeless
        failures = run.failures + 1
        kept = run.stage in _KEPT_FOR_GOOD and not isinstance(error, _OURS)
        if not kept and (hopeless or failures >= self._config.attempts):
            self._end(run, "failed", str(error))
            return
        wait = backoff_s(failures, self._config.retry_s, self._config.retry_max_s, jitter=0.0)
        log.error("run %d, failure %d, tried again in %.0f s: %s", run.number, failures, wait, error)
        update = {"failures": failures, "not_before_unix": self._clock() + wait}
        self._save(run=run.model_copy(update=update))

    def _postpone(self, run: Run, error: StageFailed) -> None:
        """As if the run had not begun: its traffic counts again, with as much as half of it again."""
        wanted = math.ceil(_MORE * sum(one.tokens for one in run.seen.values()))
        log.info("run %d is put off until there are %d fresh tokens: %s", run.number, wanted, error)
        self._save(run=None, wanted=wanted)
        self._clear()

    def _end(self, run: Run, result: Result, reason: str) -> float:
        self.results[result] += 1
        log.info("run %d ends: %s%s", run.number, result, f" ({reason})" if reason else "")
        outcome = Outcome(
            number=run.number,
            cause=run.cause,
            result=result,
            reason=reason,
            release=run.release,
            ended_unix=self._clock(),
        )
        self._save(
            run=None,
            used_unix=run.newest_unix,
            usual=self.state.usual if result == "failed" else self._adapted(run),
            wanted=0,
            history=(*self.state.history, outcome)[-HISTORY:],
        )
        self._clear()
        return 0.0

    def _adapted(self, run: Run) -> dict[str, float]:
        return adapted(self.state.usual, run.seen, self._config.watch_rule)

    def _clear(self) -> None:
        stable = next((one.number for one in reversed(self.state.history) if one.result == "stable"), None)
        self._folders.clear(self.state.last - self._config.keep_runs + 1, stable)

    def _folder(self, run: Run) -> RunFolder:
        return self._folders.of(run.number)

    @property
    def spent_s(self) -> float:
        """Of stages within the last day."""
        return sum(took for when, took in self.state.spent if when > self._clock() - DAY_S)

    def _save(self, **changes: Any) -> None:
        state = State.model_validate(self.state.model_copy(update=changes).model_dump())
        self._file.save(state)
        self.state = state
