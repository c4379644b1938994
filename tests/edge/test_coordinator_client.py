"""Test how sessions are opened at a coordinator that is away, or has just come back."""

import asyncio
import itertools
import re
import time
from typing import Any

import grpc
import pytest
from delay_proxy import DelayProxy

from edge_agent.session import coordinator_client
from edge_agent.session.adaptive_timeout import AdaptiveTimeout
from edge_agent.session.coordinator_client import CoordinatorClient
from edge_agent.session.stream import Channels
from outrider.core.acceptance.calibrator import AcceptancePrior
from outrider.core.errors import Overloaded, Unavailable
from outrider.wire import channels
from outrider.wire.status import abort
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

ensure = asyncio.ensure_future


class Opens(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(self, *, full: int = 0, retry_after_s: float = 0.2) -> None:
        self.full = full
        """Number of requests that find no room."""
        self.retry_after_s = retry_after_s
        self.asked: list[float] = []
        self.requests: list[pb.OpenSessionRequest] = []
        self.prior: pb.Prior | None = None
        self.refusal: Unavailable | None = None

    async def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext):
        self.asked.append(time.monotonic())
        self.requests.append(request)
        if self.refusal is not None:
            await abort(context, self.refusal)
        if len(self.asked) <= self.full:
            await abort(context, Overloaded("no room", retry_after_s=self.retry_after_s))
        grant = pb.Grant(verifier_id="v", address="127.0.0.1:1")
        return pb.OpenSessionResponse(session_id="s", primary=grant, prior=self.prior)


async def serving(address: str, opens: Opens | None = None) -> tuple[grpc.aio.Server, int]:
    server = channels.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(opens or Opens(), server)
    port = channels.bind(server, address)
    await server.start()
    return server, port


async def test_a_coordinator_that_has_come_back_is_found_although_its_channel_failed_before():
    server, port = await serving("127.0.0.1:0")
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        coordinator = CoordinatorClient(lambda: channel, None, ensure)
        assert (await coordinator.open("")).session_id == "s"
        await server.stop(0)
        with pytest.raises(Unavailable):
            await coordinator.open("")  # the channel has failed, and backs off
        server, _ = await serving(f"127.0.0.1:{port}")
        assert (await coordinator.open("")).session_id == "s"
        await server.stop(0)


async def test_a_session_is_asked_for_by_draft_and_class_and_what_was_measured_of_them_comes_back():
    opens = Opens()
    server, port = await serving("127.0.0.1:0", opens)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        coordinator = CoordinatorClient(lambda: channel, None, ensure)
        opens.prior = pb.Prior(first_acceptance=0.75, sibling_acceptance=0.5, observations=8)
        placed = await coordinator.open("", draft_release="d", traffic_class="code", device_id="a")
        assert placed.prior == AcceptancePrior(0.75, 0.5, 8)
        opens.prior = pb.Prior(first_acceptance=float("nan"), sibling_acceptance=0.5, observations=8)
        assert (await coordinator.open("")).prior is None
        opens.prior = None
        assert (await coordinator.open("")).prior is None
    assert [(r.draft_release, r.traffic_class) for r in opens.requests] == [("d", "code"), ("", ""), ("", "")]
    assert [r.device_id for r in opens.requests] == ["a", "", ""]
    await server.stop(0)


async def test_a_coordinator_that_stays_away_is_said_to_be_unreachable_within_three_seconds():
    server, port = await serving("127.0.0.1:0")
    await server.stop(0)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="connect") as caught:
            await CoordinatorClient(lambda: channel, None, ensure).open("")
        assert caught.value.waited
        assert time.monotonic() - begun < 3.2


async def test_a_coordinator_that_restarts_within_two_seconds_is_waited_for():
    server, port = await serving("127.0.0.1:0")
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        coordinator = CoordinatorClient(lambda: channel, None, ensure)
        await coordinator.open("")
        await server.stop(0)
        opening = asyncio.ensure_future(coordinator.open(""))
        await asyncio.sleep(1.8)
        server, _ = await serving(f"127.0.0.1:{port}")
        assert (await opening).session_id == "s"
        await server.stop(0)


async def test_a_coordinator_that_restarts_is_waited_for_although_another_call_was_in_vain_before():
    server, port = await serving("127.0.0.1:0")
    await server.stop(0)
    timeout = AdaptiveTimeout()
    timeout.expired(5.0, 5.0)  # a verifier did not answer
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        opening = ensure(CoordinatorClient(lambda: channel, None, ensure, timeout=timeout).open(""))
        await asyncio.sleep(1.0)
        server, _ = await serving(f"127.0.0.1:{port}")
        assert (await opening).session_id == "s"
        await server.stop(0)


async def test_a_coordinator_that_answers_that_it_cannot_is_not_taken_for_one_that_is_away():
    opens = Opens()
    opens.refusal = Unavailable("its store is away")
    server, port = await serving("127.0.0.1:0", opens)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(Unavailable, match="its store is away") as caught:
            await CoordinatorClient(lambda: channel, None, ensure).open("")
    assert not caught.value.waited and len(opens.asked) == 2
    await server.stop(0)


async def test_a_full_cluster_is_asked_again_when_it_says():
    opens = Opens(full=5)
    server, port = await serving("127.0.0.1:0", opens)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        assert (await CoordinatorClient(lambda: channel, None, ensure).open("", wait_s=5.0)).session_id == "s"
    pauses = [later - earlier for earlier, later in itertools.pairwise(opens.asked)]
    assert len(pauses) == 5 and all(0.15 < pause < 2.0 for pause in pauses) and sorted(pauses)[3] < 0.6
    await server.stop(0)


async def test_a_cluster_without_a_verifier_is_asked_again_and_so_is_one_that_is_full_when_it_has_one():
    opens, reasons = Opens(retry_after_s=0.1), []
    opens.refusal = Unavailable("no verifier", retry_after_s=0.1)
    server, port = await serving("127.0.0.1:0", opens)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        coordinator = CoordinatorClient(lambda: channel, None, ensure)
        looking = asyncio.create_task(coordinator.open("", wait_s=0.4, look_s=60.0, on_wait=reasons.append))
        await asyncio.sleep(1.0)
        await server.stop(0)  # the coordinator is restarted, too
        await asyncio.sleep(0.5)
        opens.refusal, opens.full = None, len(opens.asked) + 2
        server, _ = await serving(f"127.0.0.1:{port}", opens)
        assert (await looking).session_id == "s"
    assert [type(reason) for reason in reasons[-2:]] == [Overloaded, Overloaded]
    assert str(reasons[0]) == "no verifier" and re.fullmatch(r"no verifier \(asked 3 times in \d s\)", str(reasons[2]))
    await server.stop(0)


async def test_a_cluster_that_stays_without_a_verifier_is_reported_when_the_wait_is_over():
    opens = Opens()
    opens.refusal = Unavailable("no verifier", retry_after_s=0.1)
    server, port = await serving("127.0.0.1:0", opens)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        coordinator = CoordinatorClient(lambda: channel, None, ensure)
        for look_s, waited in [(0.0, False), (0.5, True)]:
            with pytest.raises(Unavailable, match="no verifier") as caught:
                await coordinator.open("", look_s=look_s, wait_s=60.0)
            assert caught.value.waited is waited
    assert 4 <= len(opens.asked) <= 7
    await server.stop(0)


@pytest.mark.parametrize(("wait_s", "retry_after_s", "asked"), [(0.0, 0.2, 1), (0.5, 0.2, 3), (5.0, 1e9, 1)])
async def test_a_cluster_that_stays_full_is_reported_when_the_wait_is_over(wait_s, retry_after_s, asked):
    opens = Opens(full=99, retry_after_s=retry_after_s)
    server, port = await serving("127.0.0.1:0", opens)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(Overloaded, match="no room"):
            await CoordinatorClient(lambda: channel, None, ensure).open("", wait_s=wait_s)
    assert 1 <= len(opens.asked) <= asked
    await server.stop(0)


async def test_a_coordinator_that_is_far_away_is_waited_for_longer_the_next_time_and_over_another_connection(
    monkeypatch,
):
    monkeypatch.setattr(coordinator_client, "_TIMEOUT_S", 0.4)
    monkeypatch.setattr(coordinator_client, "RECONNECT_TIMEOUT_S", 0.3)
    server, port = await serving("127.0.0.1:0")
    pool = Channels(None, insecure=False)
    async with DelayProxy(f"127.0.0.1:{port}", rtt_ms=500.0) as proxy:

        async def opened() -> str:
            client = CoordinatorClient(dial, None, ensure, timeout=pool.timeout, give_up=pool.retire)
            return (await client.open("")).session_id

        def dial() -> grpc.aio.Channel:
            return pool.get(proxy.address, tls=False)

        first = dial()
        with pytest.raises(Unavailable) as refused:
            await opened()
        assert not refused.value.waited  # so that the request tries again
        assert await opened() == "s"
        assert dial() is not first
        await pool.close()
    await server.stop(0)


async def garbling(first: int) -> tuple[grpc.aio.Server, int, list[bytes]]:
    """Serve a coordinator whose first answers are no messages."""
    asked: list[bytes] = []

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        asked.append(request)
        return b"\xff" if len(asked) <= first else pb.OpenSessionResponse(session_id="s").SerializeToString()

    return *await answering(answer), asked


async def answering(answer: Any) -> tuple[grpc.aio.Server, int]:
    """Serve a coordinator that opens and resumes sessions so."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name in ("OpenSession", "ResumeSession")}
    server = channels.server()
    service = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    return server, port


async def test_an_answer_that_is_no_message_is_asked_for_again():
    server, port, asked = await garbling(1)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        assert (await CoordinatorClient(lambda: channel, None, ensure).open("")).session_id == "s"
    assert len(asked) == 2
    await server.stop(0)


async def test_a_client_whose_connection_was_given_up_meanwhile_takes_another():
    opens = Opens(full=1)
    server, port = await serving("127.0.0.1:0", opens)
    pool = Channels(None, insecure=False)

    def dial() -> grpc.aio.Channel:
        return pool.get(f"127.0.0.1:{port}", tls=False)

    opening = ensure(CoordinatorClient(dial, None, ensure).open("", wait_s=5.0))
    while not opens.asked:  # noqa: ASYNC110  # it asks when it asks
        await asyncio.sleep(0.01)
    pool.retire(dial())
    assert (await opening).session_id == "s"
    await pool.close()
    await server.stop(0)
