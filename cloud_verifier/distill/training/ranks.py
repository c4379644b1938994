"""Join the processes that torchrun started, which share a student's weights and each step's texts; or run alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cloud_verifier.distill.training.heads_student import HeadsStudent
from cloud_verifier.distill.training.plan import Precision
from cloud_verifier.distill.training.student import Student

_WITH_BFLOAT16 = ("AVX512", "SVE")
"""Beginnings of torch's names of instruction sets with which bfloat16 is not emulated. With AVX2 alone a product of 512
rows took five times as long in bfloat16 as in float32 (two cores of an AMD EPYC)."""


class Ranks:
    """This process among its peers, by the variables that torchrun sets. A single process communicates with nobody."""

    def __init__(self, device: Literal["auto", "cpu", "cuda"]) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")

    def dtype(self, precision: Precision) -> torch.dtype:
        """Return the type of matrix products on this process's device."""
        if precision != "auto":
            return torch.bfloat16 if precision == "bfloat16" else torch.float32
        emulated = self.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith(_WITH_BFLOAT16)
        return torch.float32 if emulated else torch.bfloat16

    @property
    def leads(self) -> bool:
        """Return whether this process is the one that writes files and logs."""
        return self.rank == 0

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Communicate with the other ranks inside the body."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size == 1:
            yield
            return
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()

    def shard(self, student: Student | HeadsStudent) -> None:
        """Split the weights, layer by layer, among the ranks (FSDP). Raises ValueError for heads."""
        if self.size > 1:
            if isinstance(student, HeadsStudent):
                raise ValueError(f"heads are trained by one process, not by {self.size}: set ranks to 1")
            mesh = init_device_mesh(self.device.type, (self.size,))
            for layer in student.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(student, mesh=mesh)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, which all must call this; `values` may be overwritten."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's values on all ranks. Clocks differ, and all ranks must decide alike."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return [float(value) for value in tensor]
