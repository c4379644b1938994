"""Test that what the network breaks costs a session no more than another attach, whatever arrives of its messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from fake_verifier import FakeVerifier, Script
from scripted import continuation, target

from benchmarks.chaos.links import FaultyProxy
from benchmarks.support.network_link import Link
from edge_agent.drafting.draft_session import DraftSession
from edge_agent.session import stream
from edge_agent.session.driver import DriverOptions, SessionDriver
from edge_agent.session.failover import DirectRoute
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import Channels
from outrider.core.backoff import Backoff
from outrider.core.errors import BadRequest
from outrider.core.protocol.device import DeviceSession
from outrider.wire.frames import Framing

PROMPT = (1, 2, 3)
FAR_S = 4.0
"""The round trip of a satellite link that is congested."""


class Session:
    """Run one session without a draft to a verifier behind a proxy."""

    def __init__(self, proxy: FaultyProxy, channels: Channels, tokens: int, *, silence_s: float = 1.0) -> None:
        self.statistics = Statistics()
        self.failures: list[str] = []
        self.on_failure: Callable[[], None] = lambda: None
        session = DeviceSession(PROMPT, max_tokens=tokens)
        options = DriverOptions(
            "session", silence_s=silence_s, on_silence=self._on_silence, padding="buckets", timeout=channels.timeout
        )
        self._channels = channels
        self._driver = SessionDriver(
            session,
            DraftSession(session, None, None),
            DirectRoute(proxy.address, Backoff(60.0)),
            lambda attach: channels.get(attach.address, tls=attach.tls),
            options,
            self.statistics,
        )

    def _on_silence(self, link: grpc.aio.Channel) -> None:
        self.failures.append(self.statistics.attach_failure)
        self.on_failure()
        self._channels.retire(link)

    async def tokens(self) -> AsyncIterator[int]:
        async with aclosing(self._driver.deliveries()) as deliveries:
            async for delivery in deliveries:
                for token in delivery.tokens:
                    yield token
        assert self._driver.winding_down is not None
        await self._driver.winding_down


@asynccontextmanager
async def behind_a_proxy(script: Script, rtt_s: float = 0.002) -> AsyncIterator[FaultyProxy]:
    async with (
        FakeVerifier(script) as verifier,
        FaultyProxy(verifier.address, link=Link(rtt_ms=1000 * rtt_s), seed=7) as proxy,
    ):
        yield proxy


async def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("fault", ["flip", "lose"])
async def test_changed_and_lost_bytes_change_no_token_and_end_no_session(
    channels: Channels, fault: str, up: bool
) -> None:
    async with behind_a_proxy(Script(target, step_s=0.01, ping_s=0.02)) as proxy:
        session = Session(proxy, channels, tokens=240)
        got = []
        async for token in session.tokens():
            got.append(token)
            if len(got) % 12 == 0:
                getattr(proxy, fault)(up=up)
        assert got == continuation(PROMPT, 240)
        assert proxy.tampered >= 8 and session.statistics.attaches > 4


async def test_a_header_that_was_changed_on_the_way_costs_another_attach_over_another_connection(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, asked = [(("outrider-checksum", 'crc3"'),)], Framing.metadata
    monkeypatch.setattr(Framing, "metadata", lambda framing: changed.pop() if changed else asked(framing))
    async with behind_a_proxy(Script(target, step_s=0.01)) as proxy:
        session = Session(proxy, channels, tokens=20)
        assert [token async for token in session.tokens()] == continuation(PROMPT, 20)
    [failure] = session.failures  # for which the connection is given up: it repeats the headers that it has had
    assert "outrider-checksum is" in failure


async def test_a_verifier_that_does_not_know_the_method_is_asked_once_more(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "METHOD", stream.METHOD[:-1] + "o")
    async with behind_a_proxy(Script(target, step_s=0.01)) as proxy:
        session = Session(proxy, channels, tokens=20)
        session.on_failure = monkeypatch.undo
        assert [token async for token in session.tokens()] == continuation(PROMPT, 20)
        assert len(session.failures) == 1
        monkeypatch.setattr(stream, "METHOD", stream.METHOD[:-1] + "o")
        stranger = Session(proxy, channels, tokens=20)
        with pytest.raises(BadRequest):
            await anext(stranger.tokens())
        assert stranger.statistics.attaches == 2


async def test_a_verifier_that_hears_nothing_is_left_within_three_seconds_although_its_messages_come(
    channels: Channels,
) -> None:
    async with behind_a_proxy(Script(target, step_s=0.02)) as proxy:
        session = Session(proxy, channels, tokens=500, silence_s=1.5)
        got: list[int] = []

        async def run() -> None:
            async for token in session.tokens():
                got.append(token)

        running = asyncio.create_task(run())
        await eventually(lambda: len(got) >= 20)
        proxy.swallow(up=True)
        await eventually(lambda: bool(session.failures), within_s=3.0)
        assert "hears nothing from here" in session.failures[0]
        proxy.spare()
        await running
        assert got == continuation(PROMPT, 500)


async def test_a_verifier_that_names_a_round_trip_of_many_minutes_is_left_when_it_is_silent(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_RTT_S", 0.5)
    async with behind_a_proxy(Script(target, step_s=0.02, ping_s=0.05, rtt_ms=1e6)) as proxy:
        session = Session(proxy, channels, tokens=200, silence_s=0.5)
        got = []
        async for token in session.tokens():
            got.append(token)
            if len(got) == 20:
                proxy.swallow(up=False)
                asyncio.get_running_loop().call_later(2.0, proxy.spare)
        assert got == continuation(PROMPT, 200)
        assert session.failures[0].endswith("silent for 1 s")


async def test_a_verifier_whose_engine_is_silent_is_left(channels: Channels) -> None:
    script = Script(target, step_s=0.01)
    async with behind_a_proxy(script) as proxy:
        session = Session(proxy, channels, tokens=100)
        got = []
        async for token in session.tokens():
            got.append(token)
            if len(got) == 20:
                script.engine_quiet_ms = 2_000
            elif session.failures:
                script.engine_quiet_ms = 0
        assert got == continuation(PROMPT, 100)
        assert "engine" in session.failures[0]


@pytest.mark.parametrize("suspended_s", [1.5, 4.0])
async def test_a_device_that_was_suspended_stays_at_a_verifier_that_lives(
    channels: Channels, suspended_s: float
) -> None:
    async with behind_a_proxy(Script(target, step_s=0.01)) as proxy:
        session = Session(proxy, channels, tokens=100)
        got = []
        async for token in session.tokens():
            got.append(token)
            if len(got) == 20:
                time.sleep(suspended_s)  # noqa: ASYNC251  # as if the whole machine had been
        assert got == continuation(PROMPT, 100)
        assert session.failures == [] and session.statistics.attaches == 1


async def test_a_device_that_is_kept_busy_leaves_a_silent_verifier(channels: Channels) -> None:
    async def keep_busy() -> None:
        until = time.monotonic() + 8.0
        while not session.failures and time.monotonic() < until:
            time.sleep(0.8)  # noqa: ASYNC251
            await asyncio.sleep(0.01)
        left_after.append(time.monotonic() - until + 8.0)
        proxy.spare()

    left_after: list[float] = []
    async with behind_a_proxy(Script(target, step_s=0.01)) as proxy:
        session = Session(proxy, channels, tokens=100)
        got = []
        async for token in session.tokens():
            got.append(token)
            if len(got) == 20:
                proxy.swallow(up=False)
                busy = asyncio.create_task(keep_busy())
        await busy
        assert got == continuation(PROMPT, 100)
        assert left_after[0] < 5.0 and "silent" in session.failures[0]


@pytest.mark.parametrize("older_first", [True, False])
async def test_a_session_goes_from_a_verifier_of_the_previous_version_to_a_newer_one_and_back(
    channels: Channels, older_first: bool
) -> None:
    script = Script(target, step_s=0.01, ping_s=0.05, older=older_first)
    async with FakeVerifier(script) as verifier, FaultyProxy(verifier.address, link=Link()) as proxy:
        session = Session(proxy, channels, tokens=150)
        got = []
        async for token in session.tokens():
            got.append(token)
            if len(got) in (50, 100):
                await verifier.kill()
                script.older = not script.older
                await verifier.start(verifier.address)
        assert got == continuation(PROMPT, 150)
        assert session.statistics.attaches >= 3 and verifier.pongs > 5


@pytest.mark.slow
async def test_a_session_attaches_and_runs_at_a_round_trip_of_four_seconds(channels: Channels) -> None:
    async with behind_a_proxy(Script(target, step_s=0.05, rtt_ms=1000 * FAR_S), rtt_s=FAR_S) as proxy:
        session = Session(proxy, channels, tokens=160, silence_s=1.5)
        got, longest_s = [], 0.0
        async for token in session.tokens():
            got.append(token)
            longest_s = max(longest_s, channels.timeout.of(1.0))
        assert got == continuation(PROMPT, 160)
        assert longest_s > 4 * FAR_S
