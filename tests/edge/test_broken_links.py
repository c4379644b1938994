"""Test when a device leaves a verifier whose connection stays open: it, its engine or the way to it is silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import target
from session_messages import attach

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


def test_the_round_trip_and_what_is_sent_add_to_each_wait() -> None:
    channels = Channels()
    assert channels.timeout(2.5) == 2.5
    channels.measured(0.5)
    assert channels.timeout(2.5, BYTES_PER_S) == 2.5 + ROUND_TRIPS * 0.5 + 1.0
    channels.measured(1e9)
    assert channels.timeout(0.0) == ROUND_TRIPS * MAX_RTT_S
