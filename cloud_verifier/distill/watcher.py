"""Watch traffic and releases, and begin a run when there is reason to train."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.traffic_counts import ClassTraffic, TrafficCounter, alarms, training_due, updated_usual
from cloud_verifier.distill.publishing.heads import HeadsPublisher
from cloud_verifier.distill.publishing.publisher import Publisher
from cloud_verifier.distill.publishing.release_client import STABLE, ReleaseRecord
from cloud_verifier.distill.run_folder import MODEL, Job, RunFolder
from cloud_verifier.distill.state import LoopState, RunState
from outrider.artifacts.store import ArtifactStore, file_digest

log = logging.getLogger(__name__)


class TrafficWatcher:
    """Looks for a reason to train while no run is under way."""

    def __init__(
        self,
        config: DistillConfig,
        publisher: Publisher | HeadsPublisher,
        counter: TrafficCounter,
        clock: Callable[[], float],
    ) -> None:
        """Read the configured draft's hash. Raises OSError if it cannot be read."""
        self._config = config
        self._publisher = publisher
        self._counter = counter
        self._clock = clock
        self._artifacts = ArtifactStore(config.artifacts, config.suffix)
        self._first_draft = file_digest(config.draft) if config.draft.is_file() else ""
        self._tidied = float("-inf")
        self._waiting: set[str] = set()
        """Classes whose acceptance has fallen, with too little traffic to learn from so far."""

    async def watch(self, state: LoopState) -> LoopState:
        """Return the state with the run that begins, with new usual acceptances, or as it is. Raises core errors."""
        config = self._config
        known = await self._publisher.known()
        if restored := await self._publisher.restore(known):
            log.info("published again: %s", ", ".join(digest[:12] for digest in restored))
            return state
        incumbent = self._incumbent(known)
        used_unix = min(state.used_unix, self._clock())  # a verifier's clock may have been ahead
        traffic, newest_unix = await asyncio.to_thread(self._counter.count, used_unix, incumbent)
        if self._clock() - self._tidied >= config.housekeeping_s:
            self._tidied = self._clock()
            await asyncio.to_thread(self._counter.tidy_log, self._clock())
        cause = training_due(traffic, state.usual, config)
        if cause is None:
            # While a run waits for more traffic of a class, its fallen acceptance must not become the usual one.
            return state if self._alarmed(state, traffic) else _with_usual(state, traffic, config)
        reason, fresh = cause
        if sum(one.tokens for one in traffic.values()) < state.wanted:
            return state
        spent_s = state.spent_s(self._clock())
        if spent_s >= 60 * config.daily_minutes:
            log.info("%s, but the last day's stages took %.0f minutes, which is the budget", reason, spent_s / 60)
            return state
        number = state.last + 1
        run = RunState(
            number=number, cause=reason, fresh=fresh, incumbent=incumbent, newest_unix=newest_unix, seen=traffic
        )
        self._prepare(state, run)
        log.info("run %d begins: %s; fresh classes %s", run.number, run.cause, ", ".join(map(repr, run.fresh)))
        return state.changed(run=run, last=number)

    def _alarmed(self, state: LoopState, traffic: Mapping[str, ClassTraffic]) -> bool:
        """Return whether a class has fallen and too little of it is there for a run; log each class once."""
        found = alarms(traffic, state.usual, self._config)
        for name in found.keys() - self._waiting:
            log.info("%s: a run begins once there are %d tokens of it", found[name], self._config.run_tokens)
        self._waiting = set(found)
        return bool(found)

    def _incumbent(self, known: Mapping[str, ReleaseRecord]) -> str:
        """Return the digest of the newest stable release whose file is here, or else of the configured draft."""
        for one in sorted(known.values(), key=lambda one: -one.manifest.version):
            if one.state == STABLE and self._artifacts.path(one.digest).is_file():
                return one.digest
        return self._first_draft

    def _prepare(self, state: LoopState, run: RunState) -> None:
        """Write what the run's stages need into its folder."""
        config, target, folder = self._config, self._publisher.target, RunFolder(self._config.runs, run.number)
        released = self._artifacts.path(run.incumbent)
        incumbent = released if run.incumbent and released.is_file() else config.draft
        base = incumbent if config.student == "heads" else self._model_of(state, run.incumbent) or incumbent
        dataset_plan = {
            "weights_hash": target.weights_hash,
            "fresh_since_unix": state.used_unix,
            "named": run.fresh,
            "seed": config.seed,
        }
        job = Job(
            student=config.student,
            traffic=config.traffic,
            dataset=dataset_plan | config.dataset_options | {"lasts_s": config.dataset_lasts_s},
            target=config.target.resolve(),
            weights_hash=target.weights_hash,
            tokenizer_hash=target.tokenizer_hash,
            base=base.resolve(),
            incumbent=incumbent.resolve(),
            quantization=config.quantization,
            embeddings=config.embeddings,
            fresh=run.fresh,
            rule=config.gate_rule,
            threads=config.threads,
        )
        training_plan: dict[str, Any] = {
            "base": str(job.base),
            "tokenizer": str(job.target),
            "dataset": str(folder.dataset.resolve()),
            **{name: getattr(config, name) for name in ("loss", "threads", "seed")},
            **({} if "steps" in config.training_options else {"minutes": config.train_minutes}),
            **({"heads": {}} if config.student == "heads" else {}),
            **config.training_options,
        }
        folder.prepare(job, training_plan)

    def _model_of(self, state: LoopState, digest: str) -> Path | None:
        """Return the model that a release was quantized from, as long as its run's folder is kept."""
        for outcome in reversed(state.history):
            model = RunFolder(self._config.runs, outcome.number).path / MODEL
            if outcome.release == digest and model.is_dir():
                return model
        return None


def _with_usual(state: LoopState, traffic: Mapping[str, ClassTraffic], config: DistillConfig) -> LoopState:
    """Return the state with usual acceptances raised to the present ones."""
    present = updated_usual({}, traffic, config)
    return state.changed(
        usual=state.usual | {name: max(value, state.usual.get(name, 0.0)) for name, value in present.items()}
    )
