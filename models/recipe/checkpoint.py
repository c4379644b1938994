"""Training state as safetensors and JSON: no pickle, replaced atomically, readable by anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.artifacts import atomic_files


@dataclass
class Progress:
    """Everything about a training run that is not a tensor."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_began: float | None = None
    """Value of ``seconds`` when the learning rate began to fall; None before that."""
    decay_seconds: float = 0.0


def save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write one checkpoint file; a crash while writing leaves the previous one whole."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": tensor for name, tensor in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{key}.{names[id(parameter)]}"] = torch.as_tensor(value)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_files.replacing(folder / "state.safetensors") as partial:
        save_file(contiguous, partial, metadata={"progress": json.dumps(vars(progress))})


def restore(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Load the checkpoint into model and optimizers; without one, return a fresh ``Progress``."""
    path = folder / "state.safetensors"
    if not path.exists():
        return Progress()
    tensors = load_file(path)
    parameters = dict(model.named_parameters())
    owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"model.{name}"])
    for full, value in tensors.items():
        source, _, rest = full.partition(".")
        if source == "optimizer":
            key, _, name = rest.partition(".")
            parameter = parameters[name]
            # Counts of steps stay on the CPU, where the optimizers keep them.
            owners[id(parameter)].state[parameter][key] = value.to(parameter.device) if value.ndim else value
    return Progress(**_metadata(path)["progress"])


def _metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return {key: json.loads(value) for key, value in file.metadata().items()}
