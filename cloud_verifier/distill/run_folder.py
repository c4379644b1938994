"""A run's folder: what its stages are told and leave there, and what must be forgotten of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloud_verifier.distill import job
from cloud_verifier.distill.data.dataset import read_card
from cloud_verifier.distill.job import Job
from outrider.artifacts import atomic_files


class RunFolder:
    """Of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self, told: Job, training_plan: Mapping[str, Any]) -> None:
        """Begin with an empty one, whatever a start left that was killed before it was written down."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        told.write(self.path)
        atomic_files.write(self.path / job.PLAN, json.dumps(training_plan, indent=1).encode())

    def told(self) -> Job:
        """Raises OSError, pydantic.ValidationError."""
        return Job.read(self.path)

    @property
    def dataset(self) -> Path:
        return self.path / job.DATASET

    @property
    def has_dataset(self) -> bool:
        """Whether it is whole."""
        return (self.dataset / job.CARD).is_file()

    @property
    def trained(self) -> bool:
        return (self.path / job.DONE).is_file()

    @property
    def draft(self) -> Path:
        """The quantised file, once it is exported."""
        return self.path / job.DRAFT

    def lasts(self, until_unix: float) -> bool:
        """Whether none of the dataset must be forgotten before then."""
        try:
            return read_card(self.dataset).expires_unix > until_unix
        except (OSError, ValueError):
            return False

    def forget(self) -> None:
        """Delete the dataset: tenants' retention runs for it, too."""
        shutil.rmtree(self.dataset, ignore_errors=True)

    def verdict(self) -> dict[str, Any]:
        """What the gate said."""
        verdict: dict[str, Any] = json.loads((self.path / job.VERDICT).read_bytes())
        return verdict


class RunFolders:
    """Of all runs, by number."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, number: int) -> RunFolder:
        return RunFolder(self._root / str(number))

    def clear(self, kept_from: int, besides: int | None) -> None:
        """Datasets go at once; runs before `kept_from` go as a whole, but for one besides."""
        for path in self._root.glob("*"):
            if not path.name.isdecimal():
                continue
            RunFolder(path).forget()
            if int(path.name) < kept_from and int(path.name) != besides:
                shutil.rmtree(path, ignore_errors=True)
