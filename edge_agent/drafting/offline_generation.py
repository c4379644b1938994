"""Generates text with the draft model alone, where no verifier can be reached; none of it is the target's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from typing import TypeVar

from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext
from outrider.core.errors import ModelRefused
from outrider.core.protocol.device import Delivery
from outrider.core.protocol.messages import Finish
from outrider.core.tree import ROOT

Result = TypeVar("Result")

Deliveries = AsyncGenerator[Delivery, None]

Build = Callable[[], tuple[DraftSource, Callable[[], None]]]
"""Returns a source, and what frees it; both are called on the executor's thread."""


async def generate(task: DraftTask, build: Build, executor: Executor) -> Deliveries:
    """Continue the task's sequence to its end, one unverified token at a time. executor: of one thread.

    The noise is that of the verified sequence, so the draft generates the same tokens again with the same seed. Raises
    ModelRefused where the draft proposes nothing, ContextFull where the sequence is longer than its context.
    """
    loop = asyncio.get_running_loop()

    async def on_thread(work: Callable[[], Result]) -> Result:
        return await loop.run_in_executor(executor, work)

    source, free = await on_thread(build)
    try:
        await on_thread(lambda: source.begin(task))
        for position in range(len(task.received), task.max_tokens):
            token = await on_thread(lambda at=position: _next_token(source, at))  # type: ignore[misc]
            last = position + 1 == task.max_tokens
            finish = Finish.EOS if token in task.ends else Finish.LENGTH if last else Finish.NONE
            yield Delivery((token,), (True,), (False,), (), finish, verified=False)
            if finish:
                return
            await on_thread(lambda new=token: source.advance((), (new,)))  # type: ignore[misc]
    finally:
        executor.submit(free)


def _next_token(source: DraftSource, position: int) -> int:
    """Return the draft's own token at a generated position."""
    proposals = source.expand([NodeContext(ROOT, ROOT, -1, position, ())])[0]
    if not proposals:
        raise ModelRefused("the draft's logits are not numbers, so it cannot generate alone")
    return proposals[0].token
