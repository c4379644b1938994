"""One process or several: the ranks that torchrun starts share a student's weights and each step's texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cloud_verifier.distill.training.student import Student


class Ranks:
    """This process's place among them. A context manager; alone, everything here is free."""

    def __init__(self, device: Literal["auto", "cpu", "cuda"]) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
        self._mesh: DeviceMesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def shard(self, student: Student) -> None:
        """Split the weights, layer by layer, among the ranks (FSDP)."""
        if self._mesh is None:
            return
        for layer in student.layers:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(student, mesh=self._mesh)

    def sum(self, values: Tensor) -> Tensor:
        """Of all ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def of_leader(self, values: Sequence[float]) -> list[float]:
        """What rank 0 has: clocks differ, and all must decide alike."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return [float(value) for value in tensor]

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._mesh = init_device_mesh(self.device.type, (self.size,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full value of a weight that may be split among ranks, on the CPU. All ranks must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """A full value, placed and split as `parameter` is. Every rank holds all of `full`."""
    moved = full.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return moved
