"""Test what a report costs Redis: commands, those of scripts included, and bytes."""

from __future__ import annotations

import redis as redis_client
from releasing import placed

from coordinator.api import handlers
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

KEYS = {name: f"key-of-{name}-0123456789" for name in ("acme", "bobs")}
SESSIONS = 50
"""Of each tenant."""


def used(client: redis_client.Redis) -> tuple[int, int]:
    """Return the commands that Redis has run, and the bytes that it was sent."""
    commands = client.info("commandstats")
    ours = ("cmdstat_info",)
    count = sum(entry["calls"] for name, entry in commands.items() if name not in ours)
    return count, client.info("stats")["total_net_input_bytes"]


async def test_a_report_of_a_hundred_sessions_costs_little_more_than_a_command_for_each(start, redis) -> None:
    coordinator = await start(
        tenant_keys=KEYS, window_control=False, watch_interval_s=60.0, lease_ms=60_000, attach_grace_ms=60_000
    )
    await coordinator.join("v1", capacity=200)
    opened = {name: await placed(coordinator, SESSIONS, key, draft_release="d") for name, key in KEYS.items()}
    client = redis_client.Redis.from_url(redis.url, decode_responses=True)

    async def report(number: int) -> None:
        sessions = [
            SessionTelemetry(
                session_id=session_id,
                epoch=5,
                tenant=name,
                draft_release="d",
                committed=20 * number,
                acceptance_history=bytes([2, 0, 1, 2] * min(64, 5 * number)),
            )
            for name, ids in opened.items()
            for session_id in ids
        ]
        request = pb.ReportRequest(verifier_id="v1", instance=1, sessions=sessions, tokens_sequence=number)
        request.tenant_tokens.update(acme=1_000, bobs=1_000)
        assert (await coordinator.registry.Report(request)).known

    for number in (1, 2):
        await report(number)
    before = used(client)
    for number in range(3, 8):
        await report(number)
    commands, sent = ((after - earlier) / 5 for after, earlier in zip(used(client), before, strict=True))
    assert 2 * SESSIONS <= commands <= 2 * SESSIONS + 60
    assert sent <= 100_000


async def test_while_decisions_are_late_a_report_keeps_the_telemetry_of_a_third_and_of_new_sessions(
    start, redis, monkeypatch
) -> None:
    monkeypatch.setattr(handlers, "LATE", 0)
    coordinator = await start(watch_interval_s=60.0, report_interval_ms=200, lease_ms=60_000)
    await coordinator.join("v1", capacity=100)
    ids = [(await coordinator.open()).session_id for _ in range(61)]
    sessions = [SessionTelemetry(session_id=one, epoch=5, committed=400) for one in ids[1:]]
    sessions.append(SessionTelemetry(session_id=ids[0], epoch=5, committed=4))
    client = redis_client.Redis.from_url(redis.url, decode_responses=True)
    kept = []
    for _ in range(4):
        assert (await coordinator.report("v1", sessions)).known
        (key,) = client.keys("*telemetry:v1")
        kept.append(set(client.hkeys(key)))
        client.delete(key)
    assert [ids[0] in some for some in kept] == [True] * 4
    assert all(5 <= len(some) <= 40 for some in kept)
    assert kept[0] == kept[3]
    assert sum(map(len, kept[:3])) == 60 + 3
    assert set().union(*kept) == set(ids)


async def test_telemetry_that_is_kept_by_turns_lasts_as_long_as_the_reports(start, redis, monkeypatch) -> None:
    monkeypatch.setattr(handlers, "LATE", 0)
    coordinator = await start(watch_interval_s=60.0, report_interval_ms=200, lease_ms=5_000)
    await coordinator.join("v1")
    one = SessionTelemetry(session_id=(await coordinator.open()).session_id, epoch=5, committed=400)
    client = redis_client.Redis.from_url(redis.url, decode_responses=True)
    for _ in range(3):
        await coordinator.report("v1", [one])
    (key,) = client.keys("*telemetry:v1")
    for _ in range(3):
        client.pexpire(key, 1_000)
        await coordinator.report("v1", [one])
        assert client.pttl(key) > 5_000
