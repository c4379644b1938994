"""Where a process stands among the ranks: its number, its device, and where it meets the others."""

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
JOIN = timedelta(minutes=2)
"""For the slowest rank to start."""


@dataclass(frozen=True)
class Place:
    """One rank's."""

    rank: int
    size: int
    local_rank: int
    """Its number on this machine, which is the number of its GPU."""

    @classmethod
    def of_environment(cls) -> Place:
        """What torchrun, or our own front, set. Raises BadRequest."""
        missing = [name for name in TORCHRUN if not os.environ.get(name, "").isdigit()]
        if missing:
            raise BadRequest(f"{', '.join(missing)} is not set to a number: start the ranks with torchrun")
        place = cls(*(int(os.environ[name]) for name in TORCHRUN))
        if place.size < 2 or place.rank >= place.size:
            raise BadRequest(f"RANK is {place.rank} of WORLD_SIZE {place.size}, must be one of at least 2 ranks")
        return place

    def take_device(self, device: str) -> torch.device:
        """This rank's, of the kind `cpu` or `cuda`. Raises BadRequest."""
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
        """The store through which the ranks find one another, once all are there. Raises Unavailable.

        store_fd: a listening socket at MASTER_ADDR:MASTER_PORT for rank 0; without one torch opens its own.
        """
        if store_fd is not None and self.rank == 0:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                self.size,
                is_master=True,
                timeout=JOIN,
                wait_for_workers=False,
                master_listen_fd=store_fd,
            )
        else:
            store, _, _ = next(rendezvous("env://", timeout=JOIN))
        store.set(f"here/{self.rank}", "")
        try:
            store.wait([f"here/{rank}" for rank in range(self.size)], JOIN)
        except RuntimeError as error:
            raise Unavailable(f"not all {self.size} ranks came within {JOIN.seconds} s: {error}") from error
        return store
