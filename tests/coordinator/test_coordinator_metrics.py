"""Test a coordinator's metrics, scraped from one that runs on a real store."""

from __future__ import annotations

import asyncio
import re
import urllib.request

import pytest
from peers import until
from releasing import device_of, drafted, name_of, placed, publish, signed, steer

from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb


@pytest.fixture
async def scraped(start, caplog):
    """Start a coordinator; yield it and its metrics as name{labels} -> value without our prefix."""
    caplog.set_level("INFO")
    peer = await start(metrics="0")
    url = re.search(r"metrics at (\S+)", caplog.text).group(1)

    async def scrape() -> dict[str, float]:
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("outrider_coordinator_"): float(value) for name, _, value in lines}

    return peer, scrape


async def test_placements_are_counted_with_and_without_a_standby(scraped) -> None:
    peer, scrape = scraped
    await peer.join("v1")
    opened = await peer.open()
    await peer.join("v2")
    await peer.open()
    await peer.resume(opened, failed_verifiers=["v1"])
    found = await scrape()
    assert found['placements_total{kind="open",standby="no"}'] == 1
    assert found['placements_total{kind="open",standby="yes"}'] == 1
    assert found['placements_total{kind="resume",standby="yes"}'] == 1
    assert found['rpc_seconds_count{rpc="OpenSession"}'] == 2
    assert found['rpc_seconds_count{rpc="ResumeSession"}'] == 1
    assert found['redis_seconds_count{operation="claim"}'] == 3


async def test_refusals_are_counted_by_call_and_kind(scraped, refused) -> None:
    peer, scrape = scraped
    await peer.join("v1", capacity=1)
    await peer.open()
    assert isinstance(await refused(peer.open()), Overloaded)
    assert isinstance(await refused(peer.open(draft_release="no release")), BadRequest)
    found = await scrape()
    assert found['refusals_total{kind="Overloaded",rpc="OpenSession"}'] == 1
    assert found['refusals_total{kind="BadRequest",rpc="OpenSession"}'] == 1


async def test_the_fleet_is_what_verifiers_last_reported(scraped) -> None:
    peer, scrape = scraped
    await peer.join("v1", capacity=8)
    await peer.join("v2", capacity=4)
    await peer.report("v1", [(await peer.open()).session_id])
    await peer.report("v2", draining=True)

    async def seen() -> bool:
        return (await scrape()).get('sessions{state="serving"}') == 1

    await until(seen)
    found = await scrape()
    assert (found['verifiers{state="serving"}'], found['verifiers{state="draining"}']) == (1, 1)
    assert found["session_capacity"] == 8
    assert found["redis_up"] == 1
    assert found['releases{state="canary"}'] == 0


async def test_a_store_that_is_away_is_reported_and_its_figures_are_left_out(scraped, redis, refused) -> None:
    peer, scrape = scraped
    await peer.join("v1")
    assert (await scrape())["redis_up"] == 1
    redis.stop()
    assert isinstance(await refused(peer.open()), Unavailable)

    async def reported() -> bool:
        return (await scrape())["redis_up"] == 0

    await until(reported)
    found = await scrape()
    assert 'verifiers{state="serving"}' not in found
    errors = {name: value for name, value in found.items() if name.startswith("redis_errors_total")}
    assert any('operation="release_tracks"' in name for name in errors), errors
    assert all(re.fullmatch(r'redis_errors_total\{kind="\w+",operation="\w+"\}', name) for name in errors)


async def test_a_releases_trial_is_reported_with_its_evidence(scraped) -> None:
    peer, scrape = scraped
    await peer.join("v1", capacity=20)
    await publish(peer, signed(1))  # the first of a target has nothing beside it
    await steer(peer, 1, pb.RELEASE_ACTION_PROMOTE)
    await publish(peer, signed(2))
    sides = [
        (await placed(peer, 8, device_id=device_of(name_of(2), canary=version == 2)), name_of(version), right)
        for version, right in ((2, 10), (1, 20))
    ]
    await peer.report("v1", [drafted(ids[i], name, right, 40) for i in range(8) for ids, name, right in sides])

    async def weighed() -> bool:
        return (await scrape()).get('canary_samples{arm="canary",target="w"}', 0) > 0

    await until(weighed)
    found = await scrape()
    assert (found['releases{state="stable"}'], found['releases{state="canary"}']) == (1, 1)
    assert 0 <= found['canary_age_seconds{target="w"}'] < 600
    right = [found[f'canary_acceptance_ratio{{arm="{arm}",target="w"}}'] for arm in ("canary", "stable")]
    assert right == pytest.approx([0.25, 0.5])
    assert found['canary_log_evidence{target="w",way="worse"}'] > found['canary_log_evidence{target="w",way="better"}']
