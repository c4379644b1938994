"""Keep the session of a neighbour going, and compare what it gets, and when, with an undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.attack.product import Product
from benchmarks.support.harness import quantile

STARTED_S = 180.0
Window = tuple[float, float]
"""Begin and end of a time, on the clock that all processes of a machine share."""


@dataclass
class Neighbour:
    """Collect what the neighbour's sessions delivered. All run one request, so each begins as the first one did."""

    expected: Sequence[int]
    """Tokens of an undisturbed session."""
    delivered: list[tuple[float, float]] = field(default_factory=list)
    """Every delivery after a session's first: when, and the milliseconds since the one before."""
    differing: list[float] = field(default_factory=list)
    """When a token came that is not the expected one."""
    errors: list[tuple[float, str]] = field(default_factory=list)
    """When a session ended by an error, and which."""
    _last: float | None = None
    """When the running session delivered last, or began; None between sessions."""
    _position: int = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, product: Product, core: int, options: dict[str, Any]) -> AsyncIterator[Neighbour]:
        """Run an undisturbed session to its end, with a draft, and then session after session without one.

        A draft changes no token, and makes the first session short; plain streaming needs little of the core that the
        attackers share with the device. Raises RuntimeError if the undisturbed session fails.
        """
        calm = await product.run_device("generate", core, STARTED_S, **options, draft="auto", sessions=1)
        lines = [json.loads(line) for line in calm.output.splitlines() if line.startswith("{")]
        if not any("end" in line for line in lines):
            raise RuntimeError(f"the undisturbed session did not end: {calm.output[-1000:]}")
        neighbour = cls([token for line in lines for token in line.get("tokens", ())])
        async with product.device("generate", core, **options, draft=None, sessions=-1) as process:
            reading = asyncio.create_task(neighbour._read(process))
            try:
                await neighbour._until_delivering()
                yield neighbour
            finally:
                reading.cancel()

    def gaps_ms(self, *windows: Window) -> list[float]:
        """Return the gaps that ended within the windows, and one that had not ended then."""
        gaps = [gap for at, gap in self.delivered if any(begin <= at <= end for begin, end in windows)]
        for begin, end in windows:
            after = [at - gap / 1e3 for at, gap in self.delivered if at > end]
            since = min(after, default=self._last if self._last is not None else end)
            if since < end and 1e3 * (end - max(since, begin)) > max(gaps, default=0.0):
                gaps.append(1e3 * (end - max(since, begin)))
        return gaps

    def p99_ms(self, *windows: Window) -> float | None:
        """Return the 99th percentile of the gaps in these times; None if nothing was delivered."""
        return quantile(self.gaps_ms(*windows), 0.99)

    def faults(self, window: Window) -> list[str]:
        """Return what the neighbour got in this time that was not right."""
        wrong = sum(window[0] <= at <= window[1] for at in self.differing)
        said = [what for at, what in self.errors if window[0] <= at <= window[1]]
        return said + ([f"{wrong} tokens differ"] if wrong else [])

    async def _until_delivering(self) -> None:
        give_up = time.monotonic() + STARTED_S
        while not self.delivered:
            if time.monotonic() > give_up:
                raise RuntimeError(f"the neighbour got nothing within {STARTED_S:.0f} s: {self.errors[:3]}")
            await asyncio.sleep(0.1)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            with contextlib.suppress(json.JSONDecodeError):  # a warning of a library
                self._take(json.loads(line))
        self.errors.append((time.monotonic(), "the neighbour's process has ended"))

    def _take(self, line: dict[str, Any]) -> None:
        at = line["at"]
        if "tokens" in line:
            self._take_tokens(at, line["tokens"])
        elif "error" in line:
            self.errors.append((at, line["error"]))
            self._last = None
        elif "begin" in line:
            self._last, self._position = None, 0
        else:
            self._last = None

    def _take_tokens(self, at: float, tokens: Sequence[int]) -> None:
        if self._last is not None:
            self.delivered.append((at, 1e3 * (at - self._last)))
        self._last = at
        end = self._position + len(tokens)
        if list(tokens) != list(self.expected[self._position : end]):
            self.differing.append(at)
        self._position = end
