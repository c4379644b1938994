"""Test a coordinator's metrics, scraped from one that runs on a real store."""

from __future__ import annotations

import asyncio
import logging
import re
import urllib.request

import pytest
from peers import until
from releasing import device_of, drafted, name_of, placed, publish, signed, steer

from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.telemetry import logs
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry


@pytest.fixture
async def scraped(start, caplog):
    """Start a coordinator; yield it and its metrics as name{labels} -> value without our prefix."""
    caplog.set_level("INFO")
    peer = await start(metrics="0")
    url = re.search(r"metrics at (\S+)", caplog.text).group(1)

    async def scrape() -> dict[str, float]:
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
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
    assert found['redis_seconds_count{operation="place"}'] == 3


async def test_refusals_are_counted_by_call_and_kind(scraped, refused) -> None:
    peer, scrape = scraped
    await peer.join("v1", capacity=1)
    await peer.open()
    assert isinstance(await refused(peer.open()), Overloaded)
    assert isinstance(await refused(peer.open(draft_release="no release")), BadRequest)
    found = await scrape()
    assert found['refusals_total{kind="Overloaded",rpc="OpenSession"}'] == 1
    assert found['refusals_total{kind="BadRequest",rpc="OpenSession"}'] == 1


async def two_joined(peer) -> None:
    """Register v1 with a session, and v2 without."""
    await peer.join("v1", capacity=8)
    await peer.join("v2", capacity=4)
    opened = await peer.open()
    await peer.report("v1", [opened.session_id])


async def test_the_fleet_is_what_verifiers_last_reported(scraped) -> None:
    peer, scrape = scraped
    await two_joined(peer)
    await peer.report("v2", draining=True)

    async def seen() -> bool:
        return (await scrape()).get('sessions{state="serving"}') == 1

    await until(seen)
    found = await scrape()
    assert (found['verifiers{state="serving"}'], found['verifiers{state="draining"}']) == (1, 1)
    assert found["session_capacity"] == 8
    assert found["redis_up"] == 1
    assert found['releases{state="canary"}'] == 0


async def test_a_cordoned_verifier_serves_no_new_sessions_and_has_no_places(scraped) -> None:
    peer, scrape = scraped
    await two_joined(peer)
    await peer.report("v2")
    for name in ("v1", "v2"):
        request = pb.UpdateVerifierRequest(verifier_id=name, action=pb.VERIFIER_ACTION_CORDON)
        await peer.admin.UpdateVerifier(request)

    async def seen() -> bool:
        return (await scrape()).get('verifiers{state="cordoned"}') == 2

    await until(seen)
    found = await scrape()
    assert (found['verifiers{state="serving"}'], found['verifiers{state="draining"}']) == (0, 0)
    assert (found['sessions{state="serving"}'], found['sessions{state="cordoned"}']) == (0, 1)
    assert found["session_capacity"] == 0


async def test_windows_that_were_decided_are_counted(scraped) -> None:
    peer, scrape = scraped
    await peer.join("v1")
    opened = await peer.open()
    session = SessionTelemetry(
        session_id=opened.session_id, epoch=1, steps=40, committed=60, evaluated=90, accepted=30, rtt_ms=20.0,
        acceptance_history=bytes([1] * 40), draft_ms=3.0, nodes_per_level=2.0,
    )  # fmt: skip
    await peer.report("v1", [session], step_ms=50.0, step_cost_ms={1: 40.0, 8: 45.0}, node_ms=0.7)
    found = await scrape()
    assert found["decide_seconds_count"] == 1
    for name in ("window_k", "window_predicted_speedup"):
        assert found[f"{name}_count"] == 1


async def test_a_store_that_is_away_is_reported_and_its_figures_are_left_out(scraped, redis, refused) -> None:
    peer, scrape = scraped
    await peer.join("v1")
    assert (await scrape())["redis_up"] == 1
    redis.stop(kill=True)
    assert isinstance(await refused(peer.open()), Unavailable)

    async def reported() -> bool:
        return (await scrape())["redis_up"] == 0

    await until(reported)
    found = await scrape()
    assert 'verifiers{state="serving"}' not in found
    errors = {name: value for name, value in found.items() if name.startswith("redis_errors_total")}
    assert any('operation="release_tracks"' in name for name in errors), errors
    assert all(re.fullmatch(r'redis_errors_total\{kind="\w+",operation="\w+"\}', name) for name in errors)


class PlacementLog(logging.Handler):
    """Keep the level and the context of each log line of a placement."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("placed on"):
            self.logged.append((record.levelno, logs.session_id.get(), logs.request_id.get()))


async def test_a_placement_is_logged_under_its_request_and_session_and_one_without_a_prompt_for_debugging(scraped):
    peer, _ = scraped
    await peer.join("v1")
    handler = PlacementLog()
    logger = logging.getLogger("coordinator.api.handlers")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        opened = [
            await peer.sessions.OpenSession(
                pb.OpenSessionRequest(prompt_tokens=tokens), metadata=((logs.REQUEST_HEADER, "req-1"),)
            )
            for tokens in (3, 0)
        ]
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    assert handler.logged == [
        (level, one.session_id[:8], "req-1") for level, one in zip((logging.INFO, logging.DEBUG), opened, strict=True)
    ]


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
    assert 0 <= found['canary_age_seconds{target="w"}'] < 60
    right = [found[f'canary_acceptance_ratio{{arm="{arm}",target="w"}}'] for arm in ("canary", "stable")]
    assert right == pytest.approx([0.25, 0.5])
    assert found['canary_log_evidence{target="w",way="worse"}'] > found['canary_log_evidence{target="w",way="better"}']
