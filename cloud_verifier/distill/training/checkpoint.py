"""Save and restore the state of a training as one safetensors file with JSON in its header; there is no pickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cloud_verifier.distill.run_folder import StageFailed
from outrider.artifacts import atomic_files

STATE, BEST = "state.safetensors", "best.safetensors"


@dataclass
class TrainingProgress:
    """Holds a training's state but for its tensors. It has no random state: noise follows from seed and step."""

    plan: str
    """Digest of the plan."""
    step: int = 0
    tokens: int = 0
    """Labelled tokens so far."""
    seconds: float = 0.0
    """Seconds of training and evaluation, without loading."""
    overlap: float = 0.0
    """Mean overlap of the last step, by which the hybrid loss weighs KL."""
    best_step: int = -1
    best_overlap: float = -1.0
    """Highest overlap on validation text so far, the mean over classes."""
    first_overlap: float = -1.0
    """Overlap on validation text before any training."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def write(
    path: Path, progress: TrainingProgress, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write a checkpoint of the weights, and of the optimizer's state if given; a crash meanwhile leaves the previous
    one whole. Raises OSError."""
    tensors = {}
    for name, parameter in trainable(module).items():
        tensors[f"model.{name}"] = _on_cpu(parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            tensors[f"optimizer.{key}.{name}"] = _on_cpu(torch.as_tensor(value))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.replacing(path) as partial:
        save_file(tensors, partial, metadata={"progress": json.dumps(asdict(progress))})


def restore(
    path: Path, plan: str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> TrainingProgress | None:
    """Load a checkpoint into module and optimizer.

    plan: digest of the plan. Returns None if there is no file. Raises StageFailed if it is of another plan.
    """
    if not path.exists():
        return None
    parameters = trainable(module)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        progress = TrainingProgress(**json.loads(file.metadata()["progress"]))
        if progress.plan != plan:
            raise StageFailed(f"{path} belongs to another plan ({progress.plan}, not {plan}): use a new folder")
        for full_name in file.keys():  # noqa: SIM118 (it is no dict)
            part, _, rest = full_name.partition(".")
            if part == "model":
                parameters[rest].copy_(file.get_tensor(full_name))
            elif optimizer is not None:
                key, _, name = rest.partition(".")
                value = file.get_tensor(full_name)
                # The step count is a scalar on the CPU; the moments are where the weight is.
                placed = value if key == "step" else value.to(parameters[name].device)
                optimizer.state[parameters[name]][key] = placed
    return progress


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
