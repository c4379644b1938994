"""Test that windows are decided about in fair turns where there is not time for all verifiers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.registry import RegistryServicer
from outrider.wire.v1 import coordinator_pb2 as pb

VERIFIERS, INTERVAL_S = 20, 1.0


class SimulatedTime(asyncio.SelectorEventLoop):
    """Goes on to the next thing that is due instead of waiting for it."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        monkeypatch.setattr("time.monotonic", lambda: runner.get_loop().time())
        yield runner


class Deciding(RegistryServicer):
    """Decides after some time about each report, and keeps when it did about each verifier."""

    def __init__(self, seconds: float) -> None:
        self.config: Any = SimpleNamespace(window_control=True, report_interval_ms=1e3 * INTERVAL_S)
        self.store: Any = None
        self.__post_init__()
        self.seconds = seconds
        self.decided: dict[str, list[float]] = {f"v{number}": [] for number in range(VERIFIERS)}

    async def _decide(self, request: pb.ReportRequest, found: Any) -> Any:
        await asyncio.sleep(self.seconds)
        self.decided[request.verifier_id].append(asyncio.get_running_loop().time())
        return ()

    def report(self, name: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self._decisions(pb.ReportRequest(verifier_id=name), None))  # type: ignore[arg-type]


async def overloaded(deciding: Deciding, seconds: float, draw: random.Random) -> None:
    """Let all verifiers report once in each interval."""

    async def reporting(name: str) -> None:
        due = draw.random()
        while due < seconds:
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            await deciding.report(name)
            due = max(asyncio.get_running_loop().time(), due + draw.uniform(0.95, 1.05) * INTERVAL_S)

    await asyncio.gather(*map(reporting, deciding.decided))


def test_with_time_for_three_of_five_reports_no_verifier_waits_for_more_than_three_intervals(
    simulated: asyncio.Runner,
) -> None:
    deciding, seconds = Deciding(INTERVAL_S / (0.6 * VERIFIERS)), 200.0
    simulated.run(overloaded(deciding, seconds, random.Random(1)))
    waits = [
        later - earlier
        for times in deciding.decided.values()
        for earlier, later in zip([0.0, *times], [*times, seconds], strict=True)
    ]
    assert max(waits) <= 3.0 * INTERVAL_S
    assert sum(map(len, deciding.decided.values())) > 0.95 * seconds / deciding.seconds


def test_callers_have_as_much_time_to_themselves_as_deciding_made_them_wait(simulated: asyncio.Runner) -> None:
    class Contended(Deciding):
        async def _decide(self, request: pb.ReportRequest, found: Any) -> Any:
            await super()._decide(request, found)
            self._rest_s = 0.3

    async def decided_s() -> list[float]:
        deciding = Contended(0.1)
        await asyncio.gather(*map(deciding.report, ("v0", "v1", "v2")))
        return [at for times in deciding.decided.values() for at in times]

    assert simulated.run(decided_s()) == pytest.approx([0.1, 0.5, 0.9])
