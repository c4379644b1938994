"""Test that a damaged record in Redis costs what it is about, and nothing else, and is named in the log."""

from __future__ import annotations

import logging

import pytest
import redis as redis_client

from coordinator.store import keys, redis_codec
from outrider.core.errors import Unauthenticated
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

DAMAGED = b"\xff\xfe damaged"


@pytest.fixture
async def busy(coordinator):
    """Register v1 with a session, and v2 with a and b."""
    for name, sessions in (("v1", "c"), ("v2", "ab")):
        await coordinator.join(name)
        await coordinator.report(name, [SessionTelemetry(session_id=one, committed=7) for one in sessions])
    return coordinator


@pytest.fixture
def damage(redis):
    """Return a function that damages fields of a hash in Redis, of which nothing was said before."""
    redis_codec._note_damaged.cache_clear()

    def damage(key: str, *fields: str) -> None:
        with redis_client.Redis.from_url(redis.url) as store:
            for field in fields:
                assert store.hset(key, field, DAMAGED) == 0  # it was there

    return damage


async def test_sessions_are_placed_beside_a_verifier_whose_target_is_damaged(busy, damage) -> None:
    damage(keys.verifier("v1"), "target", "registration", "telemetry")
    assert {(await busy.open()).primary.verifier_id for _ in range(3)} == {"v2"}
    assert await busy.alive() == {"v2"}
    await busy.join("v1", instance=2)
    assert await busy.alive() == {"v1", "v2"}


async def test_a_verifier_is_shown_though_what_it_reported_is_damaged(busy, damage, caplog) -> None:
    damage(keys.verifier("v1"), "registration")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert await busy.alive() == {"v1", "v2"}
    assert {(await busy.open()).primary.verifier_id for _ in range(3)} == {"v2"}
    [said] = [one for one in caplog.messages if "is damaged" in one]
    assert keys.verifier("v1") in said and "remove it" in said


async def test_all_sessions_are_listed_though_what_is_kept_of_some_is_damaged(busy, redis) -> None:
    with redis_client.Redis.from_url(redis.url) as store:
        assert store.set(keys.telemetry("v2"), DAMAGED, get=True)  # it was there
        store.set(keys.windows("v2"), DAMAGED)
        store.set(keys.BOUNDS, DAMAGED)
    assert {one.telemetry.session_id: one.telemetry.committed for one in await busy.placed()} == {
        "a": 0,
        "b": 0,
        "c": 7,
    }
    again = [SessionTelemetry(session_id=one, committed=8) for one in "ab"]
    assert (await busy.report("v2", again)).known
    assert sorted(one.telemetry.committed for one in await busy.placed()) == [7, 8, 8]


async def test_tenants_are_listed_and_served_beside_one_that_is_damaged(busy, damage, refused) -> None:
    async def update(name: str, action: str) -> pb.UpdateTenantResponse:
        request = pb.UpdateTenantRequest(name=name, action=f"TENANT_ACTION_{action}")  # type: ignore[arg-type]
        return await busy.admin.UpdateTenant(request)

    key = (await update("good", "CREATE")).key
    await update("bad", "CREATE")
    damage(keys.TENANTS, "bad")
    assert [one.name for one in (await busy.admin.ListTenants(pb.ListTenantsRequest())).tenants] == ["bad", "good"]
    assert await busy.sessions.OpenSession(pb.OpenSessionRequest(), metadata=(("authorization", f"Bearer {key}"),))
    assert isinstance(await refused(busy.open()), Unauthenticated)
    assert (await update("bad", "CREATE")).key
