"""Test what a report costs Redis: commands, those of scripts included, and bytes."""

from __future__ import annotations

import redis as redis_client
from releasing import placed

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
        tenant_keys=KEYS, window_control=False, watch_s=60.0, lease_ms=60_000, attach_grace_ms=60_000
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
