"""Define a run's folder, `runs/<number>`: its files say which stages are done, so that there is no other state.

job.json            the run has begun; what its stages need
dataset/card.json   the dataset is built; deleted after the gate
plan.json           the trainer's plan
done.json           training has ended, its result is in model/
export.json         the result is exported, as draft.gguf, or heads.safetensors if heads are trained
gate.json           the verdict of the gate
release.json        the digest under which the draft was published
outcome.json        the run has ended
failures            a line for each failure of the present stage
working             a byte for each process that has ended in the middle of the present stage, and one for one in it
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest

JOB, PLAN, CARD = "job.json", "plan.json", "card.json"
HEADS = "heads.safetensors"
"""The file of trained heads, in the run's folder and in that of the trained model."""
DATASET, MODEL, DRAFT, FAILURES, WORKING = "dataset", "model", "draft.gguf", "failures", "working"
DONE, EXPORT, VERDICT, RELEASE, OUTCOME = "done.json", "export.json", "gate.json", "release.json", "outcome.json"

Stage = Literal["dataset", "training", "export", "gate", "publish", "canary"]
Result = Literal["stable", "rolled_back", "refused", "failed", "waiting"]
"""waiting: published, but held by an operator's pin; it may become stable later."""


class StageFailed(Exception):
    """A stage ended without its result; the message says why."""


class Job(BaseModel, frozen=True, extra="forbid"):
    """Describes a run. It does not change while the run lasts."""

    tokens: int
    """Recorded tokens since the last run, when this one began."""
    since_unix: float
    """Seconds; traffic from this time on is fresh."""
    newest_unix: float
    """Seconds; time of the newest traffic that the run uses up."""
    weights_hash: str
    """Hash of the target's weights. A run ends if another target is served meanwhile."""
    tokenizer_hash: str
    """Hash of the target's vocabulary."""
    base: Path
    """The draft to train: a GGUF file, or a folder with a Hugging Face causal LM. Of heads: a file, or the target's
    folder for new ones."""
    incumbent: Path
    """File that the result must beat; the target's folder if no heads are served yet."""
    parent: str
    """Hex digest of the incumbent; empty if it is no file."""


class Outcome(BaseModel, frozen=True):
    """Says what became of a run that has ended."""

    result: Result
    reason: str
    ended_unix: float


class RunFolder:
    """Holds the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dataset = path / DATASET

    @property
    def number(self) -> int:
        return int(self.path.name)

    @classmethod
    def begin(cls, runs: Path, number: int, job: Job) -> RunFolder:
        """Write the job into a new folder, in place of one that a killed process has begun."""
        run = cls(runs / str(number))
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir(mode=0o700, parents=True)
        atomic_files.write(run.path / JOB, job.model_dump_json(indent=1).encode())
        return run

    @property
    def job(self) -> Job:
        """Read the job. Raises BadRequest if it is damaged."""
        try:
            return Job.model_validate_json((self.path / JOB).read_bytes())
        except (OSError, ValueError) as error:
            raise BadRequest(f"{self.path / JOB} cannot be read ({error}); move the run's folder away") from error

    @property
    def stage(self) -> Stage | None:
        """Return the stage that comes next, the first one whose result is missing; None if the run has ended."""
        if self.has(OUTCOME):
            return None
        if self.has(RELEASE):
            return "canary"
        if self.has(VERDICT):
            return "publish"
        if not (self.dataset / CARD).is_file():
            return "dataset"
        if not self.has(DONE):
            return "training"
        return "gate" if self.has(EXPORT) else "export"

    @property
    def release(self) -> str:
        """Return the hex digest under which the draft was published; empty if it was not."""
        return str(self.read(RELEASE)["release"]) if self.has(RELEASE) else ""

    @property
    def outcome(self) -> Outcome | None:
        """Return what became of the run; None before its end."""
        return Outcome(**self.read(OUTCOME)) if self.has(OUTCOME) else None

    @property
    def failures(self) -> int:
        """Return how often the present stage has failed in a row."""
        return len((self.path / FAILURES).read_text().splitlines()) if self.has(FAILURES) else 0

    def failed(self, reason: str) -> None:
        with (self.path / FAILURES).open("a") as file:
            file.write(" ".join(reason.split()) + "\n")

    def worked(self) -> None:
        """Note that a stage has ended with its result."""
        (self.path / FAILURES).unlink(missing_ok=True)

    @property
    def crashes(self) -> int:
        """Return how many processes in a row have ended in the middle of the present stage, as a kill ends one."""
        return (self.path / WORKING).stat().st_size if self.has(WORKING) else 0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Mark that this process is in a stage."""
        with (self.path / WORKING).open("ab") as file:
            file.write(b".")
        try:
            yield
        finally:
            (self.path / WORKING).unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file. Raises OSError and ValueError."""
        return dict(json.loads((self.path / name).read_bytes()))

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all. Raises OSError."""
        atomic_files.write(self.path / name, json.dumps(content, indent=1).encode())

    def delete_dataset(self) -> None:
        """Delete the dataset, to which tenants' retention applies as to the traffic log."""
        (self.dataset / CARD).unlink(missing_ok=True)  # first: what a kill leaves is no dataset
        shutil.rmtree(self.dataset, ignore_errors=True)

    def empty(self) -> None:
        """Delete all but the JSON files, which tell the run's story."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != ".json":
                path.unlink(missing_ok=True)


def all_runs(runs: Path) -> list[RunFolder]:
    """Return the runs that have begun, the oldest first."""
    found = (RunFolder(path) for path in runs.glob("*") if path.name.isdecimal())
    return sorted((run for run in found if run.has(JOB)), key=lambda run: run.number)
