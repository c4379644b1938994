"""Hold one target together on several ranks: tensor parallelism by transformers' plan for the model type.

Rank 0 leads: it alone has an engine, schedules and verifies. Before each forward pass it broadcasts, as plain integers
over gloo, what the pass needs; the other ranks run the same pass on their own share of weights, keys and values, and
within it transformers adds the ranks' parts together. To the engine rank 0's target is a TargetModel like any other.

    with RankGroup.join() as group:  # in every process that torchrun starts
        target = group.load(directory)
        if group.leads:
            check_numerics(target)
            ...  # Engine(target)
        else:
            group.follow(target)

Layers are divided as in Megatron-LM (Shoeybi et al., 2019): whole heads to each rank, one sum after attention and one
after the MLP. The sums' order depends on the number of ranks, and so do the last bits of the logits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from transformers import AutoConfig
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel, read_module
from cloud_verifier.engine.torch_backend.parallel import rank_messages
from outrider.core.errors import BadRequest, InternalError, ModelRefused, Unavailable

log = logging.getLogger(__name__)

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
JOIN_TIMEOUT = timedelta(minutes=2)
"""Longest time for the slowest rank to start."""
LOAD_TIMEOUT = timedelta(hours=1)
"""Longest time for the slowest rank to read its weights, after the fastest."""
IDLE_TIMEOUT = timedelta(days=365)
"""Time that a follower waits for a message. A leader that dies closes its connection, which ends the wait at once."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in a group of `size`. local_rank: its number on this machine, and that of its GPU."""

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


class RankGroup:
    """Connects one rank to all others. Created by `join`."""

    def __init__(self, info: RankInfo, device: str, channel: Any) -> None:
        self.info = info
        self.device = device
        self._channel = channel
        self._failed = ""
        self._following = False
        """Whether the other ranks follow; known to rank 0 alone."""

    @classmethod
    @contextmanager
    def join(cls, device: str = "cpu", *, timeout_s: float = 30.0, store_fd: int | None = None) -> Iterator[RankGroup]:
        """Connect to the other ranks; when rank 0 leaves the context it dismisses them.

        device: cpu for gloo, cuda for nccl with one GPU per rank.
        timeout_s: a forward pass in which some rank is silent for so long has failed.
        store_fd: a listening socket at MASTER_ADDR:MASTER_PORT for rank 0's store; without one it opens its own there.
        Raises BadRequest or Unavailable.
        """
        info = RankInfo.of_environment()
        own = info.take_device(device)
        limit = timedelta(seconds=timeout_s)
        store = info.meet(store_fd)
        dist.init_process_group(
            "nccl" if own.type == "cuda" else "gloo",
            store=store,
            rank=info.rank,
            world_size=info.size,
            timeout=limit,
            device_id=own if own.type == "cuda" else None,
        )
        # Each process has timeouts of its own: rank 0 never waits long for a follower.
        channel = dist.new_group(backend="gloo", timeout=limit if info.rank == 0 else IDLE_TIMEOUT)
        group = cls(info, str(own), channel)
        try:
            yield group
        finally:
            group.dismiss()
        # Not after an error: without one of the ranks it could wait for ever, and the process's end closes all as well.
        if not group._failed:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.info.rank == 0

    def load(self, path: str | Path, *, attention: str = "sdpa", **options: Any) -> ShardedTarget:
        """Load this rank's share of a model directory; options as for TargetModel.load, without the device.

        Raises ModelRefused, on every rank alike, for a model that cannot be split.
        """
        if not is_accelerate_available():
            raise ModelRefused(
                "accelerate is not installed, and a model is split with it: pip install 'outrider[parallel]'"
            )
        if attention == "exact":
            raise ModelRefused(
                f"attention is exact, must be sdpa with {self.info.size} ranks: no bits were compared where sums are"
                " made across ranks"
            )
        target = ShardedTarget.load(path, device=self.device, attention=attention, read=self._read, **options)
        self._check_same(target)
        if self.leads:
            target.lead(self)
            self._following = True
        return target

    def follow(self, target: ShardedTarget) -> None:
        """Run rank 0's forward passes until it dismisses this rank. Raises Unavailable if rank 0 has gone."""
        pool, number = None, 0
        while True:
            try:
                message = rank_messages.receive(self._channel)
            except RuntimeError as error:
                raise Unavailable(f"rank 0 of {self.info.size} has gone: {error}") from error
            match message:
                case None:
                    return
                case list():
                    target.linear_logits(message)
                case rank_messages.Forward():
                    if pool is None or number != message.pool:
                        pool, number = None, message.pool  # frees the old pool's memory before there is a new one
                        pool = KVPool(target.layers, message.pool_slots, dtype=target.torch_dtype, device=target.device)
                    batch = message.batch(target.device)
                    target.forward(batch, target.attention.plan(batch.segments, pool))

    def dismiss(self) -> None:
        """Have the other ranks return from `follow`; nothing happens on a rank that does not lead."""
        following, self._following = self._following, False
        if following and not self._failed:
            try:
                self.send(None)
            except RuntimeError as error:
                log.info("a rank had gone before it was dismissed: %s", error)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Guard what all ranks compute together: after any failure they are no longer in step.

        Raises Unavailable for a failure, and at once on every later use.
        """
        if self._failed:
            raise Unavailable(self._failed)
        try:
            yield
        except Exception as error:
            self._failed = (
                f"the {self.info.size} ranks of the target are no longer in step, one has failed or gone: "
                f"{type(error).__name__}: {error}"
            )
            raise Unavailable(self._failed) from error

    def send(self, message: rank_messages.RankMessage) -> None:
        """Send a message from rank 0 to all other ranks."""
        rank_messages.send(message, self._channel)

    def _read(self, directory: Path, dtype: torch.dtype) -> Any:
        """Read this rank's weights for TargetModel.load, between two barriers: ranks may read at different speeds."""
        size = self.info.size
        where = f" on {size} ranks"
        dist.monitored_barrier(group=self._channel, timeout=LOAD_TIMEOUT)
        try:
            check_splits(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False), size)
            split = DistributedConfig(tp_size=size, tp_plan="auto")
            module = read_module(directory, dtype, where, distributed_config=split)
            dist.monitored_barrier(group=self._channel, timeout=LOAD_TIMEOUT)
        except ModelRefused:
            raise
        except Exception as error:
            raise ModelRefused(f"{directory} does not load{where}: {type(error).__name__}: {error}") from error
        return module

    def _check_same(self, target: ShardedTarget) -> None:
        """Raise ModelRefused unless all ranks have read the same files."""
        own = torch.tensor(list(bytes.fromhex(target.weights_hash)), dtype=torch.int32)
        all_hashes = [torch.empty_like(own) for _ in range(self.info.size)]
        dist.all_gather(all_hashes, own, group=self._channel)
        different = [rank for rank, one in enumerate(all_hashes) if not torch.equal(one, all_hashes[0])]
        if different:
            raise ModelRefused(f"rank {different[0]} has read other weights than rank 0; give all ranks the same files")


class ShardedTarget(TargetModel):
    """Runs one rank's share of a target. On rank 0, every forward pass is sent to the other ranks first."""

    def __init__(self, module: Any, **options: Any) -> None:
        self._ranks = dist.get_world_size()
        self._group: RankGroup | None = None
        self._newest_pool = 0
        """Number of the KV pool that the other ranks hold keys and values of."""
        super().__init__(module, **options)
        self.graphs = None  # each rank would decide for itself whether to replay a step, and they would drift apart
        whole = (self.config.num_attention_heads, getattr(self.config, "num_key_value_heads", None))
        if any(layer.kv_heads in whole for layer in self.layers):
            log.warning("the plan for %s leaves attention whole: every rank holds all keys and values", self.label)

    @property
    def backend(self) -> str:
        return f"{super().backend}+tp{self._ranks}"

    def lead(self, group: RankGroup) -> None:
        """Send every further forward pass to the other ranks of the group."""
        self._group = group

    def forward(self, batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        if self._group is None:
            return super().forward(batch, plan)
        if plan.pool.number < self._newest_pool:
            raise InternalError("a sharded target serves one KV pool, and this one was replaced by a newer")
        self._newest_pool = plan.pool.number
        with self._group.in_step():
            self._group.send(rank_messages.Forward.of(batch, plan.pool.number, plan.pool.slots))
            return super().forward(batch, plan)

    def linear_logits(self, ids: list[int]) -> torch.Tensor:
        if self._group is None:
            return super().linear_logits(ids)
        with self._group.in_step():
            self._group.send(ids)
            return super().linear_logits(ids)


def check_splits(config: Any, ranks: int) -> None:
    """Raise ModelRefused unless transformers has a plan that gives each rank whole heads and equal parts."""
    config = config.get_text_config()
    label = f"model type {config.model_type} cannot be split over {ranks} ranks"
    if not getattr(config, "base_model_tp_plan", None):
        raise ModelRefused(f"{label}: transformers has no tensor-parallel plan for it; serve it with one rank")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % ranks:
            raise ModelRefused(f"{label}: {name} is {number}, must be a multiple of {ranks}")
