"""Read from the environment which rank a process is, choose its device, and connect it to the other ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from outrider.core.errors import BadRequest, Unavailable

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
JOIN_TIMEOUT = timedelta(minutes=2)
"""Longest time for the slowest rank to start."""


@dataclass(frozen=True)
class RankInfo:
    """One rank of a group of `size`. local_rank: its number on this machine, which is the number of its GPU."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def of_environment(cls) -> RankInfo:
        """Read the variables that torchrun, or the verifier's front, has set. Raises BadRequest if one is wrong."""
        missing = [name for name in TORCHRUN if not os.environ.get(name, "").isdigit()]
        if missing:
            raise BadRequest(f"{', '.join(missing)} is not set to a number: start the ranks with torchrun")
        info = cls(*(int(os.environ[name]) for name in TORCHRUN))
        if info.size < 2 or info.rank >= info.size:
            raise BadRequest(f"RANK is {info.rank} of WORLD_SIZE {info.size}, must be one of at least 2 ranks")
        return info

    def take_device(self, device: str) -> torch.device:
        """Return this rank's device, of the kind `cpu` or `cuda`. Raises BadRequest if it has none."""
        if device not in ("cpu", "cuda"):
            raise BadRequest(
                f"device is {device}, must be cpu or cuda: of several ranks each takes the GPU of its number"
            )
        if device == "cpu":
            if torch.accelerator.is_available():
                raise BadRequest(
                    "device is cpu, but transformers splits over GPUs where it sees some; hide them with"
                    " CUDA_VISIBLE_DEVICES=''"
                )
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise BadRequest(
                f"rank {self.rank} needs GPU {self.local_rank}, and there are {torch.cuda.device_count()}; give each"
                " rank one, or ask for fewer ranks"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def meet(self, store_fd: int | None) -> Any:
        """Wait for all ranks and return the store through which they find one another.

        store_fd: a listening socket at MASTER_ADDR:MASTER_PORT for rank 0; without one torch opens its own.
        Raises Unavailable if some rank does not come within JOIN_TIMEOUT.
        """
        if store_fd is not None and self.rank == 0:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                self.size,
                is_master=True,
                timeout=JOIN_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=store_fd,
            )
        else:
            store, _, _ = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
        store.set(f"here/{self.rank}", "")
        try:
            store.wait([f"here/{rank}" for rank in range(self.size)], JOIN_TIMEOUT)
        except RuntimeError as error:
            raise Unavailable(f"not all {self.size} ranks came within {JOIN_TIMEOUT.seconds} s: {error}") from error
        return store
