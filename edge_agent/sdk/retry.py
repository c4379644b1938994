"""A request's tries: begun again where one failed before its first token; by the draft alone where that is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from edge_agent.drafting.offline_generation import Deliveries
from outrider.core.backoff import backoff_s
from outrider.core.errors import InternalError, OutriderError, Overloaded, Unavailable

log = logging.getLogger(__name__)

Mendable = tuple[type[OutriderError], ...]
AT_VERIFIERS: Mendable = (InternalError, Overloaded)
"""What another try at verifiers may not meet again."""
MENDABLE: Mendable = (*AT_VERIFIERS, Unavailable)
"""The same, where nobody else can write."""
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 8.0


async def persistent(
    begin: Callable[[], Deliveries], retries: int, within_s: float, mendable: Mendable = MENDABLE
) -> Deliveries:
    """What a try brings; one that fails before its first token begins again, so often and so long after the first.

    What fails later is not begun again: a session goes on elsewhere by itself, with all that it has received.
    """
    begun, tries = time.monotonic(), 0
    while True:
        came = False
        try:
            async with contextlib.aclosing(begin()) as deliveries:
                async for delivery in deliveries:
                    came = True
                    yield delivery
            return
        except mendable as error:
            pause_s = max(backoff_s(tries + 1, _FIRST_PAUSE_S, _MOST_PAUSE_S, jitter=0.25), _asked_for(error))
            tries += 1
            if came or tries > retries or time.monotonic() + pause_s - begun > within_s:
                raise
            log.info("try %d of %d in %.1f s: %s", tries + 1, retries + 1, pause_s, error)
        await asyncio.sleep(pause_s)


async def unless_unreachable(
    verified: Deliveries, alone: Callable[[Sequence[int], Unavailable], Deliveries]
) -> Deliveries:
    """What verifiers bring; where none can be reached (any more), what `alone` makes of the tokens received."""
    received: list[int] = []
    try:
        async with contextlib.aclosing(verified):
            async for delivery in verified:
                received += delivery.tokens
                yield delivery
            return
    except Unavailable as error:
        cause = error
    log.warning("no verifier can be reached, the draft goes on alone and unverified: %s", cause)
    async with contextlib.aclosing(alone(received, cause)) as deliveries:
        async for delivery in deliveries:
            yield delivery


def _asked_for(error: Exception) -> float:
    return error.retry_after_s if isinstance(error, Overloaded | Unavailable) else 0.0
