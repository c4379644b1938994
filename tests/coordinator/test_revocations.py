"""Test that revocations reach every verifier, and that the tickets of closed sessions place nothing."""

import pytest
from peers import revoked

from coordinator.store import revocations
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import PermissionDenied

HOUR_MS = 3_600_000


@pytest.fixture
async def store(redis):
    made = RedisStore(redis.url)
    yield made
    await made.close()


async def test_a_verifier_is_told_of_many_in_turn_and_of_none_twice(coordinator, store, monkeypatch):
    monkeypatch.setattr(revocations, "AT_ONCE", 3)
    await coordinator.join("v1")
    for number in range(7):
        await revocations.add(store, "session_id", f"s{number}", keep_ms=HOUR_MS)
    told, seen = [], 0
    for _ in range(4):
        answer = await coordinator.report("v1", seen=seen)
        told.append(revoked(answer))
        seen = answer.revocations_seen
    assert [len(some) for some in told] == [3, 3, 1, 0]
    assert [name for some in told for _, name in some] == [f"s{number}" for number in range(7)]


async def test_what_is_revoked_again_is_told_once(coordinator, store):
    await coordinator.join("v1")
    for _ in range(2):
        await revocations.add(store, "api_key_id", "k", keep_ms=HOUR_MS)
    assert revoked(await coordinator.report("v1")) == [("api_key_id", "k")]


async def test_a_store_that_has_lost_its_data_tells_all_that_it_knows(coordinator, store, redis):
    await coordinator.join("v1")
    await revocations.add(store, "session_id", "a", keep_ms=HOUR_MS)
    seen = (await coordinator.report("v1")).revocations_seen + 10**12  # by a clock that was ahead
    answer = await coordinator.report("v1", seen=seen)
    assert revoked(await coordinator.report("v1", seen=answer.revocations_seen)) == [("session_id", "a")]
    assert revoked(await coordinator.report("v1", seen=seen - 10**12)) == []


async def test_a_verifier_learns_which_of_its_sessions_their_devices_have_closed(coordinator):
    await coordinator.join("v1", capacity=1)
    opened = await coordinator.open()
    assert list((await coordinator.report("v1", [opened.session_id])).closed) == []
    await coordinator.close(opened)
    for _ in range(2):  # as long as it goes on there
        answer = await coordinator.report("v1", [opened.session_id])
        assert (list(answer.closed), revoked(answer)) == ([opened.session_id], [])
    await coordinator.report("v1")
    await coordinator.open()  # it has given its place back


async def test_the_ticket_of_a_closed_session_places_nothing(coordinator, refused):
    await coordinator.join("v1")
    opened = await coordinator.open()
    await coordinator.close(opened)
    error = await refused(coordinator.resume(opened))
    assert isinstance(error, PermissionDenied)
    assert "open a new one" in str(error)
