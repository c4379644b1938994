"""Training state as safetensors with JSON in the header: no pickle, one file, replaced atomically."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cloud_verifier.distill.training.ranks import like, whole
from outrider.artifacts import atomic_files

STATE, BEST = "state.safetensors", "best.safetensors"


class CheckpointRefused(ValueError):
    """A checkpoint that is not of this run; says why."""


@dataclass
class Progress:
    """Everything about a run that is not a tensor. There is no generator's state: noise follows from seed and step."""

    plan: str
    """Digest of the plan."""
    step: int = 0
    tokens: int = 0
    """Learnt from so far."""
    seconds: float = 0.0
    """Spent in training and measuring, not in loading."""
    overlap: float = 0.0
    """Mean of the last step's positions: the hybrid loss leaves KL by it."""
    best_step: int = -1
    best_overlap: float = -1.0
    """On held-out text, the mean over classes."""
    first_overlap: float = -1.0
    """The same before any training."""


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are learnt, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def gather(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return weights, and the optimiser's state if given, as full tensors. All ranks must call it."""
    tensors = {}
    for name, parameter in trained(module).items():
        tensors[f"model.{name}"] = whole(parameter).contiguous()
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            tensors[f"optimizer.{key}.{name}"] = whole(torch.as_tensor(value)).contiguous()
    return tensors


def write(path: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    """Write one file; a crash while writing leaves the previous one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.replacing(path) as partial:
        save_file(tensors, partial, metadata={"progress": json.dumps(asdict(progress))})


def progress_of(path: Path) -> Progress | None:
    """What a file tells of its run; None without one."""
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        return Progress(**json.loads(file.metadata()["progress"]))


def restore(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, plan: str | None = None
) -> Progress | None:
    """Load a file into module and optimiser; None without one. Raises CheckpointRefused for one of another plan."""
    progress = progress_of(path)
    if progress is None:
        return None
    if plan is not None and progress.plan != plan:
        raise CheckpointRefused(f"{path} belongs to another plan ({progress.plan}, not {plan}): use a new folder")
    parameters = trained(module)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for full in file.keys():  # noqa: SIM118 (it is no dict)
            part, _, rest = full.partition(".")
            if part == "model":
                parameters[rest].copy_(like(file.get_tensor(full), parameters[rest]))
            elif optimizer is not None:
                key, _, name = rest.partition(".")
                value = file.get_tensor(full)
                # The count of steps is a scalar on the CPU; the moments are shaped and split as the weight.
                placed = value if key == "step" else like(value, parameters[name])
                optimizer.state[parameters[name]][key] = placed
    return progress
