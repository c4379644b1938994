"""The draft model writes by itself, where no verifier can be had: nothing of it is the target's, and it says so."""

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

_A = TypeVar("_A")

Deliveries = AsyncGenerator[Delivery, None]

Build = Callable[[], tuple[DraftSource, Callable[[], None]]]
"""A source, and what frees it; both are called on the executor's thread."""


async def written(task: DraftTask, build: Build, executor: Executor) -> Deliveries:
    """The task's sequence to its end, a token at a time, none of it verified. executor: one thread.

    The noise is that of the verified sequence, so with the same seed the draft says the same again. Raises ModelRefused
    where the draft has nothing to say, ContextFull where the sequence is longer than its context.
    """
    loop = asyncio.get_running_loop()

    async def there(work: Callable[[], _A]) -> _A:
        return await loop.run_in_executor(executor, work)

    source, free = await there(build)
    try:
        await there(lambda: source.begin(task))
        for position in range(len(task.received), task.max_tokens):
            token = await there(lambda at=position: _next(source, at))  # type: ignore[misc]
            last = position + 1 == task.max_tokens
            finish = Finish.EOS if token in task.ends else Finish.LENGTH if last else Finish.NONE
            yield Delivery((token,), (True,), (False,), (), finish, verified=False)
            if finish:
                return
            await there(lambda new=token: source.advance((), (new,)))  # type: ignore[misc]
    finally:
        executor.submit(free)


def _next(source: DraftSource, position: int) -> int:
    """The draft's own token at a generated position."""
    proposals = source.expand([NodeContext(ROOT, ROOT, -1, position, ())])[0]
    if not proposals:
        raise ModelRefused("the draft's logits are no numbers, so that it cannot go on alone")
    return proposals[0].token
