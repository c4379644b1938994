"""Test that a device measures the round trip to regions beside its requests, and what it makes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from delay_proxy import DelayProxy

from edge_agent.session.round_trips import AGAIN_S, KEEP_S, MOST, REGIONS, UNREACHABLE_MS, RoundTrips
from edge_agent.session.stream import Channels
from outrider.wire.channels import bind, server
from outrider.wire.health import Health
from outrider.wire.v1 import coordinator_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Dialled:
    """Open channels as a client does, and count them by address."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._channels = Channels(None, insecure=False)

    def __call__(self, address: str, tls: bool) -> grpc.aio.Channel:
        self.addresses.append(address)
        return self._channels.apart(address, tls=tls)


@pytest.fixture
async def health() -> AsyncIterator[str]:
    """Return the address of a server that answers health checks."""
    running = server()
    Health().add_to(running)
    port = bind(running, "127.0.0.1:0")
    await running.start()
    yield f"127.0.0.1:{port}"
    await running.stop(None)


def probe(region: str, address: str) -> pb.RegionProbe:
    return pb.RegionProbe(region=region, address=address)


async def test_a_region_is_as_far_as_its_verifiers_health_check(health: str) -> None:
    trips = RoundTrips(Dialled())
    async with DelayProxy(health, 60.0) as far:
        await trips.measure([probe("near", health), probe("far", far.address)])
    known = trips.known()
    assert list(known) == ["near", "far"]
    assert known["near"] < 60.0 <= known["far"] < 120.0


async def test_regions_are_measured_together_and_only_when_they_are_due(health: str) -> None:
    clock, dialled = Clock(), Dialled()
    trips = RoundTrips(dialled, clock)
    both = [probe("a", health), probe("b", health)]
    await asyncio.gather(trips.measure(both), trips.measure(both))
    assert len(dialled.addresses) == 2
    clock.now += KEEP_S / 2 - 1
    await trips.measure(both)
    assert len(dialled.addresses) == 2
    clock.now += 2
    await trips.measure(both)
    assert len(dialled.addresses) == 4
    clock.now += KEEP_S
    assert trips.known() == {}


async def test_a_region_that_does_not_answer_is_the_farthest_and_asked_again_soon(health: str) -> None:
    clock, dialled = Clock(), Dialled()
    trips = RoundTrips(dialled, clock)
    beyond = probe("plain text beyond this machine", "192.0.2.1:7710")
    await trips.measure([beyond, probe("here", health)])
    assert list(trips.known()) == ["here", beyond.region]
    assert trips.known()[beyond.region] == UNREACHABLE_MS
    clock.now += AGAIN_S - 1
    await trips.measure([beyond])
    assert len(dialled.addresses) == 2
    clock.now += 2
    await trips.measure([beyond])
    assert len(dialled.addresses) == 3


async def test_no_coordinator_makes_a_device_measure_or_send_more_than_a_few_regions(health: str) -> None:
    clock, dialled = Clock(), Dialled()
    trips = RoundTrips(dialled, clock)
    for first in range(0, 600, 100):
        await trips.measure(probe(f"r{first + i}", health) for i in range(100))
    assert len(dialled.addresses) == MOST
    assert len(trips.known()) == REGIONS


async def test_of_a_slow_way_the_answers_that_came_in_time_count(health: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.session.round_trips.WITHIN_S", 1.0)
    trips = RoundTrips(Dialled())
    async with DelayProxy(health, 400.0) as far:
        await trips.measure([probe("far", far.address)])
    assert 400.0 <= trips.known()["far"] < 1_000.0


async def test_a_verifier_that_has_gone_takes_nothing_from_what_was_measured_of_its_region(health: str) -> None:
    clock = Clock()
    trips = RoundTrips(Dialled(), clock)
    await trips.measure([probe("a", health)])
    before = trips.known()
    clock.now += KEEP_S / 2 + 1
    await trips.measure([probe("a", "127.0.0.1:1")])
    assert trips.known() == before
    clock.now += KEEP_S / 2
    await trips.measure([probe("a", "127.0.0.1:1")])
    assert trips.known() == {"a": UNREACHABLE_MS}
