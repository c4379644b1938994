"""Test when a device leaves a verifier whose connection stays open: it, its engine or the way to it is silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import target
from session_messages import attach

from edge_agent.session import channels as links
from edge_agent.session import stream as streams
from edge_agent.session.channels import (
    BYTES_PER_S,
    MAX_RTT_S,
    ROUND_TRIPS,
    Channels,
    VerifierSilent,
)
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import VerifierStream
from outrider.core.protocol.messages import Commit, Open
from outrider.wire.channels import channel
from outrider.wire.v1.coordinator_pb2 import Grant

SILENCE_S = 0.3


class Clock:
    """Stand in for `time` in a device's streams: it goes on as a test says."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(streams, "time", made)
    monkeypatch.setattr(streams, "SILENCE_S", SILENCE_S)
    return made


@pytest.fixture
def script() -> Script:
    return Script(target, ping_s=0.005)


@contextlib.asynccontextmanager
async def opened(script: Script, channels: Channels) -> AsyncIterator[tuple[FakeVerifier, VerifierStream]]:
    """Yield a verifier, and a stream of which the first tokens have come."""
    async with (
        FakeVerifier(script) as verifier,
        VerifierStream(channels, Grant(address=verifier.address), Statistics(), lambda: 0.0) as stream,
    ):
        stream.open(Open(session_id="s", attach=attach(1, (1, 2, 3), max_tokens=4_000)))
        while not isinstance(await stream.receive(), Commit):
            pass
        yield verifier, stream


async def receive_for(stream: VerifierStream, clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    while clock.now < end:
        await stream.receive()
        clock.now += 0.01


async def test_a_verifier_that_hears_nothing_is_left_although_its_messages_come(
    script: Script, channels: Channels, clock: Clock
) -> None:
    with pytest.raises(VerifierSilent, match="hears nothing from here"):
        async with opened(script, channels) as (_, stream):
            script.deaf = True
            await receive_for(stream, clock, 5.0)


async def test_a_verifier_whose_engine_is_silent_is_left(script: Script, channels: Channels, clock: Clock) -> None:
    with pytest.raises(VerifierSilent, match="engine"):
        async with opened(script, channels) as (_, stream):
            script.engine_quiet_ms = 900
            await receive_for(stream, clock, 5.0)


async def test_a_device_that_was_suspended_stays_at_a_verifier_that_lives(
    script: Script, channels: Channels, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_LATE_S", 0.01)
    async with opened(script, channels) as (_, stream):
        clock.now += 3 * SILENCE_S  # as if the whole machine had been
        async with asyncio.timeout(60):
            while stream._waits_since < clock.now and not stream._silent:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await receive_for(stream, clock, SILENCE_S)


async def test_the_round_trip_and_what_is_sent_add_to_each_wait() -> None:
    channels, unused = Channels(), channel("127.0.0.1:1")
    assert channels.timeout("h:1", 2.5) == 2.5
    channels.measured("h:1", 0.5, unused)
    assert channels.timeout("h:1", 2.5, BYTES_PER_S) == 2.5 + ROUND_TRIPS * 0.5 + 1.0
    channels.measured("h:1", 1e9, unused)
    assert channels.timeout("h:1", 0.0) == ROUND_TRIPS * MAX_RTT_S
    assert channels.timeout("h:2", 2.5) == 2.5  # another peer may be near
    waits = []
    for _ in range(4):
        channels.silent("h:2", unused)
        waits.append(channels.timeout("h:2", 0.0) / ROUND_TRIPS)
    assert waits == [1.0, 2.0, 4.0, 4.0]


async def test_a_new_connection_is_kept_while_it_may_still_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Clock()
    monkeypatch.setattr(links, "time", now)
    channels = Channels()
    first = channels.get("127.0.0.1:1")
    channels.silent("127.0.0.1:1", first)
    assert channels.get("127.0.0.1:1") is first
    now.now += links.CONNECT_S + 1
    channels.silent("127.0.0.1:1", first)
    second = channels.get("127.0.0.1:1")
    assert second is not first
    channels.measured("127.0.0.1:1", 0.01, second)
    channels.silent("127.0.0.1:1", second)
    assert channels.get("127.0.0.1:1") is not second  # it was heard over this one, and is no more
    await channels.close()
