"""Where the loop is, on disk: whatever is killed, the next start reads it and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from cloud_verifier.distill.data.retrain_trigger import Seen
from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest

FORMAT = 1
FILE = "state.json"
HISTORY = 50
"""Runs that are remembered."""

Stage = Literal["dataset", "training", "export", "gate", "publish", "canary"]
Result = Literal["stable", "rolled_back", "refused", "failed", "waiting"]
"""waiting: published, and held by an operator's pin; it may still become stable."""


class Run(BaseModel, frozen=True):
    """A draft in the making. Its folder is `runs/<number>`."""

    number: int
    cause: str
    fresh: tuple[str, ...]
    """Traffic classes that it is for."""
    incumbent: str
    """Hex digest of the draft that it starts from and must beat."""
    newest_unix: float
    """Traffic up to here is used by it, whatever comes of it."""
    seen: dict[str, Seen]
    stage: Stage = "dataset"
    release: str = ""
    """Hex digest, once it is published."""
    failures: int = 0
    """Of this stage."""
    not_before_unix: float = 0.0
    """Seconds; after a failure."""


class Outcome(BaseModel, frozen=True):
    """What came of a run."""

    number: int
    cause: str
    result: Result
    reason: str
    release: str
    ended_unix: float


class State(BaseModel, frozen=True):
    """Everything that outlives the process."""

    format: int = FORMAT
    run: Run | None = None
    last: int = 0
    """Number of the last run that was begun."""
    used_unix: float = 0.0
    """Traffic up to here was used by earlier runs: no other is begun for it."""
    wanted: int = 0
    """Tokens since `used_unix` below which no run begins: the last one's dataset had too little to measure on."""
    usual: dict[str, float] = {}
    """Acceptance by class; see `watch.due`."""
    spent: tuple[tuple[float, float], ...] = ()
    """(when, seconds) of stages within a day."""
    history: tuple[Outcome, ...] = ()


class StateFile:
    """The state in a folder, replaced as a whole with every change."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def load(self) -> State:
        """Raises BadRequest for a file that is not ours."""
        if not self._path.exists():
            return State()
        try:
            state = State.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as error:
            raise BadRequest(f"{self._path} cannot be read ({error}); move it away to begin anew") from error
        if state.format != FORMAT:
            raise BadRequest(f"{self._path} has format {state.format}, this program writes {FORMAT}; move it away")
        return state

    def save(self, state: State) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_files.write(self._path, state.model_dump_json(indent=1).encode(), mode=0o600)
