"""Keep the loop's state on disk, so that the next start goes on wherever a process was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError

from cloud_verifier.distill.data.retrain_trigger import ClassTraffic
from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest

FORMAT = 1
FILE = "state.json"

Stage = Literal["dataset", "training", "export", "gate", "publish", "canary"]
Result = Literal["stable", "rolled_back", "refused", "failed", "waiting"]
"""waiting: published, but held by an operator's pin; it may become stable later."""


class RunState(BaseModel, frozen=True):
    """Describes a run, from its dataset to the end of its canary. Its folder is `runs/<number>`."""

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
    stage: Stage = "dataset"
    release: str = ""
    """Hex digest of the published draft; empty before that."""
    failures: int = 0
    """Failures of this stage in a row."""
    not_before_unix: float = 0.0
    """Seconds; time before which a failed stage is not tried again."""


class RunOutcome(BaseModel, frozen=True):
    """Records what became of a run that has ended."""

    number: int
    cause: str
    result: Result
    reason: str
    release: str
    """Hex digest of the published draft; empty if none was."""
    ended_unix: float


class LoopState(BaseModel, frozen=True):
    """Holds everything about the loop that outlives the process."""

    format: int = FORMAT
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
        return f"run {self.run.number}, {self.run.stage}" if self.run else f"watching, {self.last} runs so far"

    def changed(self, **changes: Any) -> Self:
        """Return the state with some fields changed."""
        return self.model_copy(update=changes)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the state in a folder, or return the first one if there is none. Raises BadRequest if it is damaged."""
        path = folder / FILE
        if not path.exists():
            return cls()
        try:
            state = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise BadRequest(f"{path} cannot be read ({error}); move it away to begin anew") from error
        if state.format != FORMAT:
            raise BadRequest(f"{path} has format {state.format}, this program writes {FORMAT}; move it away")
        return state

    def save(self, folder: Path) -> None:
        """Replace the state in a folder. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_files.write(folder / FILE, self.model_dump_json(indent=1).encode(), mode=0o600)
