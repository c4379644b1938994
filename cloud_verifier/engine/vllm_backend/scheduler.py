"""Make vLLM's scheduler follow the engine's plan: which requests a step serves, with which draft tokens.

Works on private interfaces of vLLM 0.32, see `load.SUPPORTED`. A request is a session in one epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in a step."""

    chain: int
    """Known tokens to compute at most."""
    drafts: tuple[int, ...] = ()
    """Draft tokens that follow the last known token."""


class PlannedScheduler(Scheduler):  # type: ignore[misc]
    """Schedules what `plan` says. Preempts requests for want of KV blocks as vLLM does, those without rows first.

    plan: request id -> its rows in the next step, in the order in which they are served.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan: Mapping[str, RequestRows] = {}
        self.num_spec_tokens: int = self.num_spec_tokens  # declared for the type checker

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        order = {request_id: at for at, request_id in enumerate(self.plan)}
        self.running.sort(key=lambda request: order.get(request.request_id, len(order)))
        for request in self.running:
            rows = self.plan.get(request.request_id)
            request.spec_token_ids = list(rows.drafts) if rows else []
        held = [request for request in self.waiting if request.request_id not in order]
        self.waiting.remove_requests(held)
        # With a number of draft tokens, vLLM pads a prompt of which one token is left with as many empty ones.
        most, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.num_spec_tokens = most
        for request in held:
            self.waiting.add_request(request)
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens a request gets: vLLM asks here last, for running requests and for waiting ones.

        One with 0 is passed over, but may still be preempted.
        """
        rows = self.plan.get(request.request_id)
        most = rows.chain + len(rows.drafts) if rows else 0
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(most, tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Ignore what the worker drafts: it drafts nothing."""
