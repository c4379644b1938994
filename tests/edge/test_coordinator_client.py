"""Test how sessions are opened at a coordinator that is away, full, or has just come back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from ports import unused_port

from edge_agent.session import coordinator_client
from edge_agent.session.channels import Channels
from edge_agent.session.coordinator_client import CoordinatorClient, prior_of
from outrider.core.errors import Overloaded, Unavailable
from outrider.wire import channels
from outrider.wire.status import abort
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc


class Opens(coordinator_pb2_grpc.CoordinatorServicer):
    """Opens sessions at a port that stays the same when it is restarted. full: requests that find no room."""

    def __init__(self, *, full: int = 0, retry_after_s: float = 0.05) -> None:
        self.full = full
        self.retry_after_s = retry_after_s
        self.asked: list[float] = []
        self.requests: list[pb.OpenSessionRequest] = []
        self.prior: pb.Prior | None = None
        self.refusal: Unavailable | None = None
        self.address = f"127.0.0.1:{unused_port()}"
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = channels.server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{channels.bind(self._server, self.address)}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        self.asked.append(time.monotonic())
        self.requests.append(request)
        if self.refusal is not None:
            await abort(context, self.refusal)
        if len(self.asked) <= self.full:
            await abort(context, Overloaded("no room", retry_after_s=self.retry_after_s))
        grant = pb.Grant(verifier_id="v", address="127.0.0.1:1")
        return pb.OpenSessionResponse(session_id="s", primary=grant, prior=self.prior)


@contextlib.asynccontextmanager
async def opening(opens: Opens) -> AsyncIterator[CoordinatorClient]:
    """Serve `opens`, and yield a client of it."""
    await opens.start()
    calling = Channels()
    yield CoordinatorClient(calling, opens.address, asyncio.ensure_future)
    await calling.close()
    await opens.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_client, "_LEAST_DELAY_S", 0.01)


async def test_a_session_is_asked_for_by_draft_and_class_and_what_was_measured_of_them_comes_back() -> None:
    opens = Opens()
    async with opening(opens) as coordinator:
        opens.prior = pb.Prior(first_acceptance=0.75, sibling_acceptance=0.5, observations=8)
        placed = await coordinator.open(pb.OpenSessionRequest(draft_release="d", traffic_class="code", device_id="a"))
        assert prior_of(placed) == opens.prior
        opens.prior = pb.Prior(first_acceptance=float("nan"), sibling_acceptance=0.5, observations=8)
        assert prior_of(await coordinator.open(pb.OpenSessionRequest())) is None
        opens.prior = None
        assert prior_of(await coordinator.open(pb.OpenSessionRequest())) is None
    asked = [(one.draft_release, one.traffic_class, one.device_id) for one in opens.requests]
    assert asked == [("d", "code", "a"), ("", "", ""), ("", "", "")]


async def test_a_coordinator_that_stays_away_is_said_to_be_unreachable_once_it_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_client, "RECONNECT_TIMEOUT_S", 0.2)
    opens = Opens()
    async with opening(opens) as coordinator:
        await opens.stop()
        with pytest.raises(Unavailable, match="connect") as caught:
            await coordinator.open(pb.OpenSessionRequest())
        assert caught.value.waited


async def test_a_coordinator_that_restarts_is_waited_for() -> None:
    opens = Opens()
    async with opening(opens) as coordinator:
        await coordinator.open(pb.OpenSessionRequest())
        await opens.stop()
        waiting = asyncio.ensure_future(coordinator.open(pb.OpenSessionRequest()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await opens.start()
        assert (await waiting).session_id == "s"


async def test_a_coordinator_that_answers_that_it_cannot_is_not_taken_for_one_that_is_away() -> None:
    opens = Opens()
    opens.refusal = Unavailable("its store is away")
    async with opening(opens) as coordinator:
        with pytest.raises(Unavailable, match="its store is away") as caught:
            await coordinator.open(pb.OpenSessionRequest())
    assert not caught.value.waited and len(opens.asked) == 2


async def test_a_full_cluster_is_asked_again_when_it_says() -> None:
    opens = Opens(full=5)
    async with opening(opens) as coordinator:
        assert (await coordinator.open(pb.OpenSessionRequest(), wait_s=5.0)).session_id == "s"
    pauses = [later - earlier for earlier, later in itertools.pairwise(opens.asked)]
    assert len(pauses) == 5 and min(pauses) > 0.03


async def test_a_cluster_without_a_verifier_is_asked_again_and_so_is_one_that_is_full_when_it_has_one() -> None:
    opens, reasons = Opens(), list[Exception]()
    opens.refusal = Unavailable("no verifier", retry_after_s=0.03)
    async with opening(opens) as coordinator:
        looking = asyncio.create_task(
            coordinator.open(pb.OpenSessionRequest(), wait_s=10.0, look_s=60.0, on_wait=reasons.append)
        )
        while len(reasons) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await opens.stop()  # the coordinator is restarted, too
        opens.refusal, opens.full = None, len(opens.asked) + 2
        await opens.start()
        assert (await looking).session_id == "s"
    assert [type(reason) for reason in reasons[-2:]] == [Overloaded, Overloaded]
    assert str(reasons[0]) == "no verifier" and re.fullmatch(r"no verifier \(asked 3 times in \d s\)", str(reasons[2]))


class Clock:
    """Stand in for `time`: 20 ms pass between two looks at it."""

    def __init__(self) -> None:
        self._ticks = itertools.count(step=0.02)

    def monotonic(self) -> float:
        return next(self._ticks)


NO_VERIFIER = Unavailable("no verifier", retry_after_s=0.05)


@pytest.mark.parametrize(
    ("refusal", "waits", "again"),
    [
        (NO_VERIFIER, {"wait_s": 60.0}, False),
        (NO_VERIFIER, {"look_s": 0.2}, True),
        (None, {"look_s": 60.0}, False),
        (None, {"wait_s": 0.2}, True),
    ],
    ids=["without a verifier", "without a verifier for long", "full", "full for long"],
)
async def test_a_cluster_that_stays_as_it_is_is_reported_when_the_wait_is_over(
    refusal: Unavailable | None, waits: dict[str, float], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "time", Clock())
    opens = Opens(full=99)
    opens.refusal = refusal
    async with opening(opens) as coordinator:
        with pytest.raises((Unavailable, Overloaded), match=r"^no (verifier|room)") as caught:
            await coordinator.open(pb.OpenSessionRequest(), **waits)  # type: ignore[arg-type]
    assert (len(opens.asked) > 1) is again and len(opens.asked) < 8
    assert not isinstance(caught.value, Unavailable) or caught.value.waited is again


async def test_a_cluster_that_names_a_wait_that_is_too_long_is_reported_at_once() -> None:
    async with opening(opens := Opens(full=99, retry_after_s=1e9)) as coordinator:
        with pytest.raises(Overloaded):
            await coordinator.open(pb.OpenSessionRequest(), wait_s=5.0)
    assert len(opens.asked) == 1
