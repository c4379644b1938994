"""Define what the recipe builds, as frozen values: nothing below the command line reads anything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

VOCAB_SIZE = 8192
END, PAD, USER, ASSISTANT, SYSTEM = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (END, PAD, USER, ASSISTANT, SYSTEM)

CODE_KINDS = ("code", "tests", "chat_code")
ALL_KINDS = (*CODE_KINDS, "math", "chat_math")


# Windows out of every 32, by kind. Code is the largest and the hardest to learn; the test suite is
# twice its size and of less use, so it is seen about a fifth of the time it could be.
FULL_MIXTURE = {"code": 14, "tests": 3, "math": 6, "chat_math": 4, "chat_code": 5}
NARROW_MIXTURE = {"code": 26, "tests": 6}


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3 decoder with tied embeddings. Widths are multiples of 32, or Q8_0 falls back to F16."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int = 2048


@dataclass(frozen=True)
class TrainPlan:
    """Sets how one model is trained. Time is wall clock spent in training, summed over resumes."""

    minutes: float
    decay_share: float = 0.18
    """Share of the time in which the learning rate falls linearly to zero."""
    warmup_steps: int = 40
    batch_tokens: int = 4096
    """Small: with a few million tokens to see, more steps are worth more than quieter gradients."""
    micro_tokens: int = 2048
    """Tokens per forward and backward pass: bounds the memory held by logits and activations."""
    window: int = 512
    decay_window: int = 1024
    """Window while the rate falls: the model meets long contexts once it has learnt the short ones."""
    muon_rate: float = 0.015
    adam_rate: float = 3e-3
    weight_decay: float = 0.02
    save_seconds: float = 240.0


@dataclass(frozen=True)
class DistilPlan:
    """Sets how much the target writes, and how a draft learns from it."""

    tokens: int
    """Tokens the target generates for the drafts to learn from."""
    generate_minutes: float
    """Generation stops here even if the tokens are not there yet."""
    training: TrainPlan
    continuation: int = 128
    """Tokens generated per prompt."""
    batch: int = 64
    """Prompts continued at a time; also the sequences per training step."""
    temperatures: tuple[float, ...] = (0.0, 0.9)
    """Sampling temperatures, used in turn: half greedy, half sampled, as the draft will be used."""
    kl_share: float = 0.5
    """First part of the training that is pure KL; the hybrid loss follows."""
    hybrid_eta: float = 1.0
    """eta in ``w = exp(-eta * alpha)``: how fast the loss leaves KL as acceptance alpha grows."""


@dataclass(frozen=True)
class HeadsPlan:
    """Sets how heads on the target are trained."""

    minutes: float
    kind: Literal["eagle", "medusa"] = "eagle"
    depth: int = 6
    learning_rate: float = 3e-3
    batch_tokens: int = 640


@dataclass(frozen=True)
class Scale:
    """One consistent choice of everything."""

    target: ModelShape
    draft: ModelShape
    target_plan: TrainPlan
    warm_plan: TrainPlan
    distil: DistilPlan
    heads: HeadsPlan


@dataclass(frozen=True)
class Job:
    """Holds what the command line asked for."""

    data: Path
    work: Path
    scale: Scale
    threads: int = 2
    device: str = "cpu"
    seed: int = 20
    mixture: dict[str, int] = field(default_factory=lambda: dict(FULL_MIXTURE))

    def stage(self, name: str) -> Path:
        """Return the directory of a stage, made if need be."""
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path


DRAFT_SHAPE = ModelShape(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=384)

# The drafts' first lessons have no decay to speak of: distillation goes on at the full rate and then decays.
FULL = Scale(
    target=ModelShape(hidden=512, layers=7, heads=8, kv_heads=2, head_dim=64, ffn=1280),
    draft=DRAFT_SHAPE,
    target_plan=TrainPlan(minutes=88.0),
    warm_plan=TrainPlan(
        minutes=6.0, decay_share=0.02, muon_rate=0.02, adam_rate=6e-3, batch_tokens=8192, decay_window=512
    ),
    distil=DistilPlan(
        tokens=900_000,
        generate_minutes=13.0,
        training=TrainPlan(minutes=6.0, decay_share=0.5, muon_rate=0.02, adam_rate=4e-3, warmup_steps=20),
    ),
    heads=HeadsPlan(minutes=25.0),
)

TINY = Scale(
    target=ModelShape(hidden=224, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=576),
    draft=ModelShape(hidden=96, layers=2, heads=3, kv_heads=1, head_dim=32, ffn=256),
    target_plan=TrainPlan(minutes=4.0, adam_rate=6e-3, decay_window=512),
    warm_plan=TrainPlan(minutes=1.0, decay_share=0.02, adam_rate=8e-3, decay_window=512),
    distil=DistilPlan(
        tokens=30_000,
        generate_minutes=1.0,
        training=TrainPlan(minutes=1.0, decay_share=0.5, adam_rate=6e-3, warmup_steps=5),
        continuation=96,
    ),
    heads=HeadsPlan(minutes=1.0),
)

# For a GPU: too large for this repository, and on a CPU for training.
LARGE = Scale(
    target=ModelShape(hidden=768, layers=16, heads=12, kv_heads=4, head_dim=64, ffn=2048),
    draft=ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=768),
    target_plan=TrainPlan(minutes=15.0, decay_share=0.3, batch_tokens=65_536, micro_tokens=32_768),
    warm_plan=TrainPlan(
        minutes=2.0, decay_share=0.02, muon_rate=0.02, batch_tokens=65_536, micro_tokens=32_768, decay_window=512
    ),
    distil=DistilPlan(
        tokens=2_000_000,
        generate_minutes=5.0,
        training=TrainPlan(minutes=3.0, decay_share=0.5, muon_rate=0.02, adam_rate=4e-3, warmup_steps=20),
        batch=512,
    ),
    heads=HeadsPlan(minutes=5.0),
)

SCALES = {"full": FULL, "tiny": TINY, "large": LARGE}
