"""Define a run's folder: the job that its stages read, and the files that they leave there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from cloud_verifier.distill.config import Embeddings, GateRule, Quantization
from cloud_verifier.distill.data.plan import CARD, DatasetCard
from outrider.artifacts import atomic_files

JOB, PLAN = "job.json", "plan.json"
"""Files that the stages read: `Job`, and for the trainer `TrainingPlan`."""
HEADS = "heads.safetensors"
"""The file of trained heads, in the run's folder and in that of the trained model."""
DATASET, MODEL, DONE, DRAFT, VERDICT = "dataset", "model", "done.json", "draft.gguf", "gate.json"
"""Files that the stages write: dataset, trained model, the trainer's last file, the exported draft, the verdict."""


Stage = Literal["dataset", "training", "export", "gate", "publish", "canary"]


class Job(BaseModel, frozen=True, extra="forbid"):
    """The parameters of a run's stages, which do not change while it lasts."""

    student: Literal["draft", "heads"] = "draft"
    traffic: str
    dataset: dict[str, Any]
    """Fields of `DatasetPlan`."""
    target: Path
    weights_hash: str
    """Hash of the target's weights. A run ends if another target is served meanwhile."""
    tokenizer_hash: str
    """Hash of the target's vocabulary."""
    base: Path
    """The draft to train: a GGUF file, or a folder with a Hugging Face causal LM. Of heads: a file, or the target's
    folder for new ones."""
    incumbent: Path
    """File that the result must beat; the target's folder if no heads are served yet."""
    quantization: Quantization
    embeddings: Embeddings | None = None
    fresh: tuple[str, ...]
    """Traffic classes to train for."""
    rule: GateRule
    threads: int = 1

    @property
    def artifact(self) -> str:
        """Return the name of the run's file that is judged and published."""
        return HEADS if self.student == "heads" else DRAFT

    @classmethod
    def read(cls, run: Path) -> Job:
        """Read the job in a run's folder. Raises OSError and pydantic.ValidationError."""
        return cls.model_validate_json((run / JOB).read_bytes())


class RunFolder:
    """Holds the files of one run."""

    def __init__(self, runs: Path, number: int) -> None:
        self.path = runs / str(number)
        self.dataset = self.path / DATASET

    def prepare(self, job: Job, training_plan: Mapping[str, Any]) -> None:
        """Write the job and the plan into an empty folder, in place of one that a killed process has begun."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        atomic_files.write(self.path / JOB, job.model_dump_json(indent=1).encode())
        atomic_files.write(self.path / PLAN, json.dumps(training_plan, indent=1).encode())

    @property
    def next_stage(self) -> Stage:
        """Return the stage that comes next: the first one whose result is missing."""
        if self._has(VERDICT):
            return "publish"
        if not (self.dataset / CARD).is_file():
            return "dataset"
        if not self._has(DONE):
            return "training"
        return "gate" if self._has(DRAFT, HEADS) else "export"

    def dataset_lasts(self, until_unix: float) -> bool:
        """Return whether none of the dataset expires before a time in seconds; False if there is no dataset."""
        try:
            return DatasetCard.read(self.dataset).expires_unix > until_unix
        except (OSError, ValueError):
            return False

    def delete_dataset(self) -> None:
        """Delete the dataset, to which tenants' retention applies as to the traffic log."""
        (self.dataset / CARD).unlink(missing_ok=True)  # first: what a kill leaves is no dataset
        shutil.rmtree(self.dataset, ignore_errors=True)

    def verdict(self) -> dict[str, Any]:
        """Read the gate's verdict. Raises OSError and ValueError."""
        return dict(json.loads((self.path / VERDICT).read_bytes()))

    def _has(self, *names: str) -> bool:
        return any((self.path / name).is_file() for name in names)


def clean_up(runs: Path, keep_from: int, besides: int | None) -> None:
    """Delete the datasets of all runs, and all else of runs before `keep_from` but one."""
    numbers = [int(path.name) for path in runs.glob("*") if path.name.isdecimal()]
    for folder, number in ((RunFolder(runs, number), number) for number in numbers):
        folder.delete_dataset()
        if number < keep_from and number != besides:
            shutil.rmtree(folder.path, ignore_errors=True)
