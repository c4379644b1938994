"""A group of ranks that hold one target together: tensor parallelism by transformers' plan for the model type.

Rank 0 leads: it alone has an engine, a scheduler and walks. Before each forward it broadcasts, as plain integers over
gloo, what the forward needs; the others run the same forward on their own share of weights, keys and values, and inside
it transformers adds the ranks' parts together. To the engine the leader's target is a TargetModel like any other.

    with RankGroup.join() as group:  # in every process that torchrun starts
        target = group.load(directory)
        if group.leads:
            self_test(target)
            ...  # Engine(target)
        else:
            group.follow(target)

Shared out as in Megatron-LM (Shoeybi et al., 2019): whole heads to each rank, one sum after attention and one after the
MLP. The sums' order depends on the number of ranks, and so do the last bits of the logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from cloud_verifier.engine.batch import PackedBatch, Segment
from cloud_verifier.engine.kernels.attention import AttentionBackend, AttentionPlan, Scoring
from cloud_verifier.engine.kv_pool import KVPool
from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine.parallel import rank_messages
from cloud_verifier.engine.parallel.rank_info import Place
from outrider.core.errors import InternalError, ModelRefused, Unavailable

log = logging.getLogger(__name__)

LOAD = timedelta(hours=1)
"""For the slowest rank to read its weights, after the fastest."""
IDLE = timedelta(days=365)
"""How long a follower waits for an order. A leader that dies closes its connection, which ends the wait at once."""


class RankGroup:
    """All ranks, seen from one of them. Made by `join`."""

    def __init__(self, place: Place, device: str, channel: Any) -> None:
        self.place = place
        self.device = device
        self._channel = channel
        self._failed = ""
        self._following = False
        """Whether there is somebody to dismiss; the leader's."""

    @classmethod
    @contextmanager
    def join(cls, device: str = "cpu", *, timeout_s: float = 30.0, store_fd: int | None = None) -> Iterator[RankGroup]:
        """Meet the other ranks; the leader's end dismisses them. Raises BadRequest or ModelRefused.

        device: cpu for gloo, cuda for nccl with one GPU per rank.
        timeout_s: a forward in which some rank is silent for so long has failed.
        store_fd: a listening socket at MASTER_ADDR:MASTER_PORT for rank 0's store; without one it opens its own there.
        """
        place = Place.of_environment()
        own = place.take_device(device)
        limit = timedelta(seconds=timeout_s)
        store = place.meet(store_fd)
        dist.init_process_group(
            "nccl" if own.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
            device_id=own if own.type == "cuda" else None,
        )
        # Timeouts hold for this process alone: the leader never waits long for a follower.
        channel = dist.new_group(backend="gloo", timeout=limit if place.rank == 0 else IDLE)
        group = cls(place, str(own), channel)
        try:
            yield group
        finally:
            group.dismiss()
        # Not after an error: with a lost rank it could wait for ever, and the process's end closes all as well.
        if not group._failed:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    def load(self, path: str | Path, *, attention: str = "sdpa", **options: Any) -> ShardedTarget:
        """This rank's share of a model directory; options as for TargetModel.load, but for the device.

        Raises ModelRefused, on every rank alike, for one that cannot be split.
        """
        if not is_accelerate_available():
            raise ModelRefused(
                "accelerate is not installed, and a model is split with it: pip install 'outrider[parallel]'"
            )
        if attention == "exact":
            raise ModelRefused(
                f"attention is exact, must be sdpa with {self.place.size} ranks: no bits were compared where sums are"
                " made across ranks"
            )
        target = ShardedTarget.load(path, device=self.device, attention=attention, read=self._read, **options)
        self._check_same(target)
        if self.leads:
            target.lead(self)
            self._following = True
        return target

    def follow(self, target: ShardedTarget) -> None:
        """Do what the leader says until it says that it is over. Raises Unavailable where it has gone."""
        pool, number = None, 0
        while True:
            match self._next():
                case rank_messages.End():
                    return
                case rank_messages.Linear(ids):
                    target.linear_logits(ids)
                case rank_messages.Forward() as order:
                    if pool is None or number != order.pool:
                        pool, number = None, order.pool  # first let go of the old one's memory
                        pool = KVPool(target.layers, order.pool_slots, dtype=target.torch_dtype, device=target.device)
                    batch = order.batch(target.device)
                    target.forward(batch, target.attention.plan(batch.segments, pool))

    def _next(self) -> rank_messages.Order:
        try:
            return rank_messages.receive(self._channel)
        except RuntimeError as error:
            raise Unavailable(f"rank 0 of {self.place.size} has gone: {error}") from error

    def dismiss(self) -> None:
        """The leader's: the followers' `follow` returns."""
        following, self._following = self._following, False
        if following and not self._failed:
            try:
                self.order(rank_messages.End())
            except RuntimeError as error:
                log.info("a rank had gone before the end: %s", error)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What all ranks do together. After any failure they no longer know of one another where they stand.

        Raises Unavailable for it, and at once from then on.
        """
        if self._failed:
            raise Unavailable(self._failed)
        try:
            yield
        except Exception as error:
            self._failed = (
                f"the {self.place.size} ranks of the target are no longer in step, one has failed or gone: "
                f"{type(error).__name__}: {error}"
            )
            raise Unavailable(self._failed) from error

    def order(self, order: rank_messages.Order) -> None:
        """Tell the followers. The leader's alone."""
        rank_messages.send(order, self._channel)

    def _meet(self) -> None:
        dist.monitored_barrier(group=self._channel, timeout=LOAD)

    def _read(self, directory: Path, dtype: torch.dtype, device: str) -> Any:
        """What TargetModel.load reads a model with; between two meetings, since ranks may read at different speeds."""
        size = self.place.size
        self._meet()
        try:
            check_splits(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False), size)
            module = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="eager",
                distributed_config=DistributedConfig(tp_size=size, tp_plan="auto"),
            )
            self._meet()
        except ModelRefused:
            raise
        except Exception as error:
            raise ModelRefused(f"{directory} does not load on {size} ranks: {type(error).__name__}: {error}") from error
        return module

    def _check_same(self, target: ShardedTarget) -> None:
        """All ranks must have read the same files: parts of different models would give tokens of neither."""
        own = torch.tensor(list(bytes.fromhex(target.weights_hash)), dtype=torch.int32)
        all_hashes = [torch.empty_like(own) for _ in range(self.place.size)]
        dist.all_gather(all_hashes, own, group=self._channel)
        different = [rank for rank, one in enumerate(all_hashes) if not torch.equal(one, all_hashes[0])]
        if different:
            raise ModelRefused(f"rank {different[0]} has read other weights than rank 0; give all ranks the same files")


class ShardedTarget(TargetModel):
    """One rank's share of a target. On the leader, every forward is announced to the others first."""

    def __init__(self, module: Any, **options: Any) -> None:
        self._ranks = dist.get_world_size()
        self._group: RankGroup | None = None
        self._pools: WeakKeyDictionary[KVPool, int] = WeakKeyDictionary()
        self._newest = 0
        super().__init__(module, **options)
        self.graphs = None  # each rank would decide for itself whether a step is replayed, and they would part
        whole = (self.config.num_attention_heads, getattr(self.config, "num_key_value_heads", None))
        if any(layer.kv_heads in whole for layer in self.layers):
            log.warning("the plan for %s leaves attention whole: every rank holds all keys and values", self.label)

    @property
    def backend(self) -> str:
        return f"{super().backend}+tp{self._ranks}"

    def lead(self, group: RankGroup) -> None:
        """From now on announce every forward."""
        self._group = group
        self.attention = _AnnouncedBackend(self.attention)

    def forward(self, batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        if self._group is None or not isinstance(plan, _AnnouncedPlan):
            return super().forward(batch, plan)
        number = self._number(plan.pool)
        with self._group.in_step():
            self._group.order(rank_messages.Forward.of(batch, number, plan.pool.slots))
            return super().forward(batch, plan.plan)

    def linear_logits(self, ids: list[int]) -> torch.Tensor:
        if self._group is None:
            return super().linear_logits(ids)
        with self._group.in_step():
            self._group.order(rank_messages.Linear(ids))
            return super().linear_logits(ids)

    def _number(self, pool: KVPool) -> int:
        """Followers hold the keys and values of one pool at a time, the newest."""
        if pool not in self._pools:
            self._newest += 1
            self._pools[pool] = self._newest
        number = self._pools[pool]
        if number < self._newest:
            raise InternalError("a sharded target serves one KV pool, and this one was replaced by a newer")
        return number


@dataclass(frozen=True)
class _AnnouncedPlan:
    """A plan that still knows its pool, which `forward` has to name to the others."""

    plan: AttentionPlan
    pool: KVPool

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        return self.plan.attend(layer, query, key, value, scoring)


class _AnnouncedBackend:
    """The leader's attention. A plan that cannot be made fails here, before any other rank has heard of the step."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name, self.row_tile = backend.name, backend.row_tile

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        return _AnnouncedPlan(self._backend.plan(segments, pool), pool)


def check_splits(config: Any, ranks: int) -> None:
    """Whole heads and equal parts for each rank, by a plan that transformers has. Raises ModelRefused."""
    config = config.get_text_config()
    label = f"model type {config.model_type} cannot be split over {ranks} ranks"
    if not getattr(config, "base_model_tp_plan", None):
        raise ModelRefused(f"{label}: transformers has no tensor-parallel plan for it; serve it with one rank")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % ranks:
            raise ModelRefused(f"{label}: {name} is {number}, must be a multiple of {ranks}")
