"""Define the loop's state, which changes by pure methods, and keep it on disk.

The next start goes on from there, wherever a process was killed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.traffic_counts import ClassTraffic, updated_usual
from cloud_verifier.distill.errors import PermanentFailure, TooLittleTraffic
from cloud_verifier.distill.run_folder import RunFolder, Stage
from outrider.artifacts import atomic_files
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, ModelRefused

FILE = "state.json"
DAY_S = 86_400.0
HISTORY = 50
"""Outcomes that are kept."""

Result = Literal["stable", "rolled_back", "refused", "failed", "waiting"]
"""waiting: published, but held by an operator's pin; it may become stable later."""
_OWN_ERRORS = (BadRequest, ModelRefused, FileNotFoundError, ValueError)
"""Errors that lie with the draft, the publisher or a damaged file, and will not pass by themselves."""
_MORE_TRAFFIC = 1.5
"""Multiple of the traffic of a run that came too early at which the next one begins."""


class RunState(BaseModel, frozen=True):
    """Describes the state of a run, from its dataset to the end of its canary. Its folder is `runs/<number>`."""

    number: int
    cause: str
    fresh: tuple[str, ...]
    """Traffic classes to train for."""
    incumbent: str
    """Hex digest of the draft that it starts from and must beat."""
    newest_unix: float
    """Seconds; time of the newest traffic that the run uses up."""
    seen: dict[str, ClassTraffic]
    """The traffic by class when the run began."""
    release: str = ""
    """Hex digest of the published draft; empty before that."""
    failures: int = 0
    """Failures of a stage in a row."""
    not_before_unix: float = 0.0
    """Seconds; time before which a failed stage is not tried again."""

    def stage(self, runs: Path) -> Stage:
        """Return the stage that the run is in, by the files in its folder."""
        return "canary" if self.release else RunFolder(runs, self.number).next_stage


class RunOutcome(BaseModel, frozen=True):
    """The record of what became of a run that has ended."""

    number: int
    cause: str
    result: Result
    reason: str
    release: str
    """Hex digest of the published draft; empty if none was."""
    ended_unix: float


class LoopState(BaseModel, frozen=True):
    """The state of the loop that outlives the process."""

    format: Literal[1] = 1
    run: RunState | None = None
    last: int = 0
    """Number of the last run that was begun."""
    used_unix: float = 0.0
    """Seconds; earlier runs have used up the traffic until then."""
    wanted: int = 0
    """Tokens since `used_unix` below which no run begins: the last one's dataset had too little to measure on."""
    usual: dict[str, float] = {}
    """Usual acceptance by class, with which the present one is compared."""
    spent: tuple[tuple[float, float], ...] = ()
    """(time of its end, seconds that it took) of each stage within a day."""
    history: tuple[RunOutcome, ...] = ()

    def __str__(self) -> str:
        return f"run {self.run.number}: {self.run.cause}" if self.run else f"watching, {self.last} runs so far"

    def changed(self, **changes: Any) -> Self:
        """Return the state with some fields changed."""
        return self.model_copy(update=changes)

    def advanced(self, run: RunState, release: str = "") -> Self:
        """Return the state after a stage that worked. release: digest of the published draft."""
        return self.changed(run=run.model_copy(update={"failures": 0, "not_before_unix": 0.0, "release": release}))

    def ended(self, run: RunState, result: Result, reason: str, now: float, config: DistillConfig) -> Self:
        """Return the state after a run. It has used up its traffic, whatever came of it."""
        outcome = RunOutcome(
            number=run.number, cause=run.cause, result=result, reason=reason, release=run.release, ended_unix=now
        )
        return self.changed(
            run=None,
            used_unix=run.newest_unix,
            usual=self.usual if result == "failed" else updated_usual(self.usual, run.seen, config),
            wanted=0,
            history=(*self.history, outcome)[-HISTORY:],
        )

    def failed(self, run: RunState, error: Exception, now: float, config: DistillConfig) -> Self:
        """Return the state after a failed stage: the run is put off, tried again later or given up.

        A run that has passed the gate is not given up for errors that lie elsewhere.
        """
        if isinstance(error, TooLittleTraffic):
            # As if the run had not begun: its traffic counts again.
            wanted = math.ceil(_MORE_TRAFFIC * sum(one.tokens for one in run.seen.values()))
            return self.changed(run=None, wanted=wanted)
        failures = run.failures + 1
        passed = run.stage(config.runs) in ("publish", "canary")
        kept = passed and not isinstance(error, _OWN_ERRORS)
        if not kept and (isinstance(error, PermanentFailure) or failures >= config.attempts):
            return self.ended(run, "failed", str(error), now, config)
        wait_s = backoff_s(failures, config.retry_s, config.retry_max_s, jitter=0.0)
        return self.changed(run=run.model_copy(update={"failures": failures, "not_before_unix": now + wait_s}))

    def with_stage_time(self, seconds: float, now: float) -> Self:
        """Return the state with the time that a stage took, and without times of more than a day ago."""
        recent = [(ended, took) for ended, took in self.spent if ended > now - DAY_S]
        return self.changed(spent=(*recent, (now, seconds)))

    def spent_s(self, now: float) -> float:
        """Return the seconds that stages took within the last day."""
        return sum(took for ended, took in self.spent if ended > now - DAY_S)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the state in a folder, or return the first one if there is none. Raises BadRequest if it is damaged."""
        path = folder / FILE
        if not path.exists():
            return cls()
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise BadRequest(f"{path} cannot be read ({error}); move it away to begin anew") from error

    def save(self, folder: Path) -> None:
        """Replace the state in a folder. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_files.write(folder / FILE, self.model_dump_json(indent=1).encode(), mode=0o600)
