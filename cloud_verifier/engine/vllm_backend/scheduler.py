"""Make vLLM's scheduler follow the engine's plan: which requests a step serves, with which draft tokens.

Works on private interfaces of vLLM 0.32, see `vllm_backend.SUPPORTED`. A request is a session in one epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


@dataclass(frozen=True)
class RequestRows:
    """Says which rows of one request a step computes."""

    chain: int
    """Known tokens to compute at most."""
    drafts: tuple[int, ...] = ()
    """Draft tokens that follow the last known token."""


class PlannedScheduler(Scheduler):  # type: ignore[misc]
    """Schedules what `plan` says. Preempts requests for want of KV blocks as vLLM does, those without rows first.

    plan: request id -> its rows in the next step, in the order in which they are served. rows: request id -> how many
    rows the last step had. preemptions: how often a request has lost its blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan: Mapping[str, RequestRows] = {}
        self.rows: Mapping[str, int] = {}
        self.preemptions = 0
        self.num_spec_tokens: int = self.num_spec_tokens  # declared for the type checker
        self._most_sampled = self.num_spec_tokens + 1

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        order = {request_id: at for at, request_id in enumerate(self.plan)}
        self.running.sort(key=lambda request: order.get(request.request_id, len(order)))
        for request in self.running:
            rows = self.plan.get(request.request_id)
            request.spec_token_ids = list(rows.drafts) if rows else []
        waiting = sorted(self.waiting, key=lambda request: order.get(request.request_id, len(order)))
        held = [request for request in waiting if request.request_id not in order]
        self.waiting.remove_requests(waiting)
        for request in waiting[: len(waiting) - len(held)]:
            self.waiting.add_request(request)
        # With a number of draft tokens, vLLM pads a prompt of which one token is left with as many empty ones.
        most, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.num_spec_tokens = most
        for request in held:
            self.waiting.add_request(request)
        self.rows = output.num_scheduled_tokens
        self.preemptions += len(output.preempted_req_ids or ())
        return output

    # What vLLM's cache manager says about room: blocks of all kinds of layers come from one pool.

    @property
    def free_blocks(self) -> int:
        """Return how many blocks a request that does not run may take, less those that vLLM keeps for running ones."""
        kept = self.kv_cache_manager.watermark_blocks if self.running else 0
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return free - kept

    def cached_tokens(self, request: Request) -> int:
        """Return how many of a request's first tokens are in the prefix cache."""
        _, cached, _ = self.kv_cache_manager.get_computed_blocks(request)
        return int(cached)

    def blocks_missing(self, requests: Iterable[Request], ahead: int) -> int:
        """Return how many free blocks requests take until their known tokens, and `ahead` more of each, are computed.

        Cached blocks that one of vLLM's requests holds count nothing, others once. Layers with a window count no more
        blocks than vLLM lets them hold.
        """
        manager = self.kv_cache_manager
        manager.new_step_starts()  # or a block that the last step has cached counts as if it were not there yet
        missing, found = 0, set[int]()
        for request in requests:
            hit, computed = manager.empty_kv_cache_blocks, request.num_computed_tokens
            if request.status is not RequestStatus.RUNNING:
                hit, computed, _ = manager.get_computed_blocks(request)
            tokens = min(request.num_tokens + ahead, self.max_model_len)
            missing += manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=tokens,
                new_computed_blocks=hit.blocks,
                num_encoder_tokens=0,
                total_computed_tokens=computed,
                num_local_computed_tokens=computed,
                num_tokens_main_model=tokens,
                apply_admission_cap=True,
            )
            idle = {block.block_id for group in hit.blocks for block in group if not (block.ref_cnt or block.is_null)}
            missing -= len(idle & found)
            found |= idle
        return missing

    def blocks_freed(self, request: Request, successor: Request) -> int:
        """Return how many blocks the end of a request frees, without those that its successor begins with."""
        manager = self.kv_cache_manager
        hit, *_ = manager.get_computed_blocks(successor)
        kept = {block.block_id for group in hit.blocks for block in group}
        held = [block for group in manager.get_blocks(request.request_id).blocks for block in group]
        return sum(1 for block in held if block.ref_cnt == 1 and not block.is_null and block.block_id not in kept)

    def evict_blocks(self, request: Request) -> None:
        """Take a request's blocks out of the prefix cache, so that no other request begins with them."""
        held = self.kv_cache_manager.get_blocks(request.request_id).blocks
        self.kv_cache_manager.evict_blocks({block.block_id for group in held for block in group if not block.is_null})

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens a request gets: vLLM asks here last, for running requests and for waiting ones.

        One with 0 is passed over, but may still be preempted.
        """
        rows = self.plan.get(request.request_id)
        most = rows.chain + len(rows.drafts) if rows else 0
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(most, tokens)

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> CachedRequestData:
        """Return what workers are told of requests that they know, with all tokens of a request's last step.

        vLLM names only tokens that the next step computes, and only for pipelines: the ranks of a pipeline that do not
        sample would never hear of draft tokens that were accepted. `worker.take_sampled` is the other half.
        """
        data = super()._make_cached_request_data(*args, **kwargs)
        if self.use_pp:
            data.new_token_ids = [self.requests[name].all_token_ids[-self._most_sampled :] for name in data.req_ids]
        return data
