"""How long a request may take, for its caller."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from edge_agent.validation import real
from outrider.core.errors import BadRequest, TimedOut


@dataclass(frozen=True)
class Timeout:
    """Seconds from the call on, with everything that it takes: loading the draft for the first time, waiting for room,
    other tries. None is without end."""

    total: float | None = 600.0
    """Until the last token."""
    first_token: float | None = 120.0
    """Until the first token."""

    @classmethod
    def of(cls, value: object) -> Timeout:
        """What callers may give: a Timeout, seconds in all, or None for no end. Raises BadRequest."""
        if value is None:
            return cls(None, None)
        if not isinstance(value, Timeout):
            return cls(_seconds("timeout", value), None)
        return cls(_seconds("timeout.total", value.total), _seconds("timeout.first_token", value.first_token))


DEFAULT_TIMEOUT = Timeout()


def _seconds(field: str, value: object) -> float | None:
    if value is None:
        return None
    seconds = real(field, value)
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise BadRequest.bound(field, seconds, "a number of seconds greater than 0, or None")
    return seconds


class Deadline:
    """Of one request, which begins when this is made."""

    def __init__(self, timeout: Timeout, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._begun = clock()

    @contextlib.asynccontextmanager
    async def holds(self, *, first_token: bool) -> AsyncIterator[None]:
        """Cancel the body when the time is over, and raise TimedOut. first_token: whether none has come yet."""
        most, of_first = self._most(first_token=first_token)
        left = None if most is None else max(0.0, self._begun + most - self._clock())
        try:
            async with asyncio.timeout(left) as scope:
                yield
        except TimeoutError:
            if not scope.expired() or most is None:
                raise
            raise _over(most, of_first=of_first) from None

    def _most(self, *, first_token: bool) -> tuple[float | None, bool]:
        """(seconds, whether they are those of the first token)"""
        total, first = self._timeout.total, self._timeout.first_token
        if first_token and first is not None and (total is None or first < total):
            return first, True
        return total, False


def _over(seconds: float, *, of_first: bool) -> TimedOut:
    what = "no token came within" if of_first else "the request took longer than"
    field = "first_token" if of_first else "total"
    return TimedOut(
        f"{what} {seconds:g} s; allow more with timeout=Timeout({field}=SECONDS)", seconds=seconds, first_token=of_first
    )
