"""Test that a device finds its nearest region by itself, stays there, and leaves it when the whole region dies."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from delay_proxy import DelayProxy
from system import Device, System

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
SHORT = {"max_tokens": 4, "ignore_eos": True}
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "seed": 5}
FAR_MS = 1_500.0
"""More than the verifiers' speeds mostly differ for an answer, which share the cores of one machine."""
FAILOVER_S = 5.0
PLACING = ("--spill-share", "0.1", "--spill-ms", "3000")
"""So that the far region may be the standby."""


@dataclass
class Regions:
    """Two verifiers here, and one behind a link of FAR_MS; `where` holds the device's arguments."""

    system: System
    near: list[str]
    far: str
    where: dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> AsyncIterator[Regions]:
    async with System(tmp_path_factory.mktemp("regions"), pair, count=0, placing=PLACING) as system:
        started = await asyncio.gather(
            *(system.start_verifier("--region", region) for region in ("here", "here", "there"))
        )
        far = started[-1].address
        async with DelayProxy(far, FAR_MS) as link:
            where = {**system.here, "reroute": {far: link.address}, "draft": None}
            yield Regions(system, [child.address for child in started[:-1]], far, where)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Device]:
    async with Device.start(tmp_path_factory.mktemp("cache")) as running:
        yield running


async def test_once_it_has_measured_a_device_is_placed_in_the_nearest_region(regions: Regions, device: Device) -> None:
    status = await regions.system.status()
    assert sorted(v.region for v in status.verifiers) == ["here", "here", "there"]
    give_up = time.monotonic() + 90.0
    while True:  # its first requests do not wait for the measurement
        if regions.far not in [await _attached(regions, device) for _ in range(4)]:
            break
        assert time.monotonic() < give_up
    attached = [await _attached(regions, device) for _ in range(8)]
    assert attached.count(regions.far) <= 2  # when other work on the machine slows both near ones down


async def _attached(regions: Regions, device: Device) -> str:
    running = await device.begin(regions.where, PROMPT, **SHORT)
    await running.done()
    return running.attaches[0]


async def test_a_region_that_dies_is_left_for_the_standby_in_another_one(regions: Regions, device: Device) -> None:
    whole = (await device.run(regions.where, PROMPT, **LONG))["tokens"]
    for _ in range(5):
        running = await device.begin(regions.where, PROMPT, **LONG)
        await running.until_tokens(40)
        if running.attaches[0] in regions.near:
            break
        await running.done()
    assert running.attaches[0] in regions.near
    died = time.clock_gettime(time.CLOCK_MONOTONIC)
    for address in regions.near:
        regions.system.verifier_at(address).signal_group(signal.SIGKILL)
    done = await running.done()
    assert done["tokens"] == whole
    assert running.places[:2] == [running.attaches[0], regions.far]  # without a try at the other one that died
    assert min(at for at in running.times if at > died) - died < FAILOVER_S + 4 * FAR_MS / 1e3
    assert await _attached(regions, device) == regions.far  # and later requests find it, too
