"""What the stages of one run are told, beside it: `job.json` in its folder. The trainer has `plan.json` of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cloud_verifier.distill.publishing.gate import Rule
from outrider.artifacts import atomic_files

FILE = "job.json"
PLAN = "plan.json"
DATASET, MODEL, DONE, DRAFT, VERDICT = "dataset", "model", "done.json", "draft.gguf", "gate.json"
"""What a run's folder comes to hold: what is learnt from, the draft trained, the trainer's last word, the file that
devices get, and the gate's answer."""
HOPELESS = 3
"""Exit status of a stage that would end alike again."""
EARLY = 4
"""Exit status of a stage that more traffic would help, and nothing else."""
CARD = "card.json"
"""In the dataset's folder, once it is whole."""


class Job(BaseModel, frozen=True, extra="forbid"):
    """Frozen for the length of a run."""

    traffic: str
    dataset: dict[str, Any]
    """`DatasetPlan`."""
    target: Path
    weights_hash: str
    """Of the target, as is the next one: a run whose target is no longer the one that is served ends."""
    tokenizer_hash: str
    base: Path
    """The draft that is trained on: a GGUF file, or a folder with a Hugging Face causal LM."""
    incumbent: Path
    """GGUF file to beat."""
    quantization: str
    widened: tuple[str, ...] = ()
    fresh: tuple[str, ...]
    rule: Rule
    threads: int = 1

    @classmethod
    def read(cls, run: Path) -> Job:
        """Raises OSError, pydantic.ValidationError."""
        return cls.model_validate_json((run / FILE).read_bytes())

    def write(self, run: Path) -> None:
        atomic_files.write(run / FILE, self.model_dump_json(indent=1).encode())
