"""What one training run does: `plan.json` in its folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cloud_verifier.distill.training.losses import LossKind

PLAN = "plan.json"


class TrainingPlan(BaseModel):
    """Frozen for the length of a run: a checkpoint of another plan is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Path
    """The draft to begin with: a GGUF file, or a folder with a Hugging Face causal LM."""
    tokenizer: Path
    """The target's folder: draft and target share one tokenizer, and what is trained here is saved with it."""
    dataset: Path
    """What `cloud_verifier.distill.data.dataset.build` wrote."""

    loss: LossKind = "hybrid"
    eta: float = Field(default=1.0, ge=0)
    """How fast the hybrid leaves KL as acceptance grows (arXiv 2602.23881)."""
    kl_share: float = Field(default=0.5, ge=0, le=1)
    """First part of the run that is pure KL, whatever the loss: total variation does not pull where q has no mass."""
    lora_rank: int = Field(default=0, ge=0, le=1024)
    """0: all weights are trained. Else only low-rank additions to the layers' matrices (arXiv 2106.09685)."""
    lora_alpha: float = Field(default=2.0, gt=0)
    """Weight of the additions, as a multiple of the rank."""

    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    """Time spent in training, summed over resumes. Either this or `steps`."""
    # Measured with the demo pair, draft-narrow on 60,000 tokens of arithmetic (new to it) and 24,000 of code, Q8_0 in
    # llama.cpp, chains of 6, single runs: how much of the way to the general draft tokens per step went on arithmetic
    # (2.08 -> 4.52), and how they changed on code; answers with their prompts as context, but for the last three, and
    # all weights at one rate, none of the base's in the result.
    #   250 steps of 4,096 tokens at 3e-3    77%   -0.2%
    #   300 steps of 2,048 tokens at 3e-3    77%   -1.0%   in 0.6 of the computing
    #   100 steps of 4,096 tokens at 3e-3    65%   +0.7%   two minutes on two cores
    #   100 steps of 4,096 tokens at 3e-3    45%   -4.1%   answers alone
    #   300 steps of 2,048 tokens at 3e-3    49%  -11.8%   answers alone: more than the gate lets pass
    #   150 steps of 2,048 tokens at 6e-3    45%  -21.4%   answers alone
    learning_rate: float = Field(default=3e-3, gt=0)
    """Of a draft of some million weights; one of hundreds of millions wants a smaller one."""
    # The same draft on 59,000 tokens of arithmetic and 37,000 of code, 2,048 a step at 3e-3, single runs; overlap on
    # text that is watched, and in the last two lines on more of it:
    #                                                                  arithmetic   code
    #   before                                                           0.469      0.764
    #   120 steps, tokens' rate 1,   epsilon 1e-8                        0.766      0.726
    #   120 steps, tokens' rate 1,   epsilon 1e-5                        0.765      0.734
    #   120 steps, tokens' rate 0.1, epsilon 1e-8                        0.744      0.754
    #   300 steps, tokens' rate 0.1, epsilon 1e-5                        0.799      0.745
    #   300 steps, tokens' rate 0.1, epsilon 1e-5, base's share 0        0.788      0.756   (before: 0.452, 0.773)
    #   300 steps, tokens' rate 0.1, epsilon 1e-5, base's share 0.1      0.780      0.763
    adam_epsilon: float = Field(default=1e-5, gt=0)
    """Gradients far below it make no step. The more weights, the smaller they are: a large draft wants it smaller."""
    token_rate_share: float = Field(default=0.1, ge=0, le=1)
    """Share of `learning_rate` at which embeddings and the output layer learn."""
    warmup_steps: int = Field(default=20, ge=0)
    decay_share: float = Field(default=0.5, ge=0, le=1)
    """Last part of the run, in which the rate falls to zero in a straight line."""
    base_share: float = Field(default=0.1, ge=0, lt=1)
    """Part of the base's weights in the mean with the trained ones that is the result (arXiv 2109.01903): it gives back
    much of what was unlearnt for little of what was learnt. Not with LoRA."""
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_norm: float = Field(default=1.0, gt=0)
    batch_tokens: int = Field(default=4096, ge=1)
    """Tokens learnt from in one step, over all ranks."""
    micro_tokens: int = Field(default=2048, ge=1)
    """Tokens of one forward pass, padding included: bounds the memory of activations and logits."""

    measure_steps: int = Field(default=50, ge=1)
    """Steps between measurements on held-out text. Not seconds: the best checkpoint must not depend on the machine."""
    measure_tokens: int = Field(default=16_384, ge=1)
    """Held-out tokens that a measurement takes of each class."""
    report_steps: int = Field(default=10, ge=1)
    """Steps between lines of the curve."""
    save_seconds: float = Field(default=60.0, ge=0)
    """The most training that a kill can lose."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the products; weights, sums and the optimiser's state are float32."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each rank."""
    seed: int = 0

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give either steps or minutes")
        return self

    @classmethod
    def read(cls, folder: Path) -> TrainingPlan:
        """The plan of a run. Raises OSError, pydantic.ValidationError."""
        return cls.model_validate_json((folder / PLAN).read_text(encoding="utf-8"))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def digest(self) -> str:
        """Tells plans apart by what they say."""
        # Of what was said: fields that a later version adds do not part a run from its checkpoint.
        return hashlib.sha256(self.model_dump_json(exclude_unset=True).encode()).hexdigest()[:16]
