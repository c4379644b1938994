"""The length of a run and its learning rate: warm-up, constant, straight down to zero. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cloud_verifier.distill.training.losses import LossKind
from cloud_verifier.distill.training.plan import TrainingPlan


@dataclass(frozen=True)
class Orders:
    """For the next step."""

    rate: float
    loss: LossKind
    finished: bool


def orders(plan: TrainingPlan, step: int, seconds: float) -> Orders:
    """Decide the step after `step` steps and `seconds` of training."""
    share = progress(plan, step, seconds)
    warm = min(1.0, (step + 1) / plan.warmup_steps) if plan.warmup_steps else 1.0
    decay = min(1.0, (1 - share) / plan.decay_share) if plan.decay_share else 1.0
    return Orders(plan.learning_rate * warm * decay, "kl" if share < plan.kl_share else plan.loss, share >= 1)


def progress(plan: TrainingPlan, step: int, seconds: float) -> float:
    """How much of the run is over, 0 to 1."""
    done = step / plan.steps if plan.steps is not None else seconds / (60 * (plan.minutes or 0.0))
    return min(1.0, done)
