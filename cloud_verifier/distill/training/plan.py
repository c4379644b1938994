"""Define the plan of a training run, `plan.json` in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cloud_verifier.distill.run_folder import PLAN

LossKind = Literal["kl", "tv", "hybrid"]
Precision = Literal["auto", "bfloat16", "float32"]


class TrainingPlan(BaseModel):
    """The settings of one training run, which never change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Path
    """The draft to train: a GGUF file, or a folder with a Hugging Face causal LM."""
    tokenizer: Path
    """The target's folder. Draft and target share one tokenizer, and the result is saved with it."""
    heads: dict[str, Any] | None = None
    """Further fields of the heads (`HeadsShape`: kind, depth, width, window) to train on the target in `tokenizer`,
    instead of a draft; `base` is then a file of heads, or the target's folder for new ones."""
    dataset: Path
    """A folder that `cloud_verifier.distill.dataset.build` wrote."""
    lora_rank: int = Field(default=0, ge=0, le=1024)
    """Rank of the LoRA adapters on the layers' matrices (arXiv 2106.09685); 0 trains all weights instead."""

    loss: LossKind = "hybrid"
    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    """Minutes of training, summed over resumes. A plan has either this or `steps`."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate. The default suits a draft of some ten million weights; one of hundreds of millions needs
    less."""
    train_embeddings: bool = False
    """Train the embeddings and the output layer, too. Most of a small draft's weights, they know the rare tokens of all
    other traffic, and what was quantized once stays exact."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps in which the rate rises to `learning_rate`."""
    decay_share: float = Field(default=0.5, ge=0, le=1)
    """Last part of the run, from 0 to 1, in which the rate falls linearly to zero."""
    base_share: float = Field(default=0.1, ge=0, lt=1)
    """Weight of the base in the mean of base and trained weights that is the result (arXiv 2109.01903). It undoes much
    of the forgetting at little cost to what was learnt. LoRA does not use it."""
    weight_decay: float = Field(default=0.0, ge=0)
    batch_tokens: int = Field(default=2048, ge=1)
    """Labelled tokens of one step, on average."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens of one forward pass, padding included, which bounds the memory of activations and logits."""

    measure_steps: int = Field(default=100, ge=1)
    """Steps between evaluations on validation text. They do not follow the clock, so that the best checkpoint does not
    depend on the machine."""

    precision: Precision = "auto"
    """Precision of matrix products; weights, sums and the optimizer's state are float32. `auto` is bfloat16, and
    float32 on a CPU that has to emulate bfloat16."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads."""
    seed: int = 0

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give either steps or minutes")
        return self

    @classmethod
    def read(cls, folder: Path) -> TrainingPlan:
        """Read the plan of a run. Raises OSError and pydantic.ValidationError."""
        return cls.model_validate_json((folder / PLAN).read_text(encoding="utf-8"))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
