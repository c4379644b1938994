"""Test that coordinators share the deciding: who owns a verifier, who may write, and who takes over."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from dataclasses import replace

import pytest
import redis as redis_client
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import Peer, until

from coordinator.api import handlers
from coordinator.api.server import running
from coordinator.records import Decisions, Report, Window, WindowBounds, WindowDecision, WorkloadKey
from coordinator.store import keys, redis_codec
from coordinator.store.embedded_redis import EmbeddedServer
from coordinator.store.ownership import LEASE_MS, Ownership
from coordinator.store.redis_store import RedisStore
from coordinator.store.sessions import WindowStore
from outrider.core.acceptance.history import HIT, MISS
from outrider.wire import channels
from outrider.wire.v1 import coordinator_pb2, telemetry_pb2

DECISION = WindowDecision("s", 1, Window(2, 6, 0.0, 1.0), 0.1, 1.5, 2.0, "pays", 1.0, 2.0, 24, 0.5, 4)
ids = st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), min_size=2, max_size=10, unique=True)


def made_of(decision: WindowDecision, reported_unix: float) -> Decisions:
    directives = [coordinator_pb2.SessionDirective(session_id=decision.reason)]
    message = coordinator_pb2.ReportResponse(directives=directives).SerializeToString()
    return Decisions(redis_codec.decisions_to_json([decision]), message, reported_unix)


def among(*live: str) -> Ownership:
    """Return what a coordinator knows that has read these others."""
    known = Ownership.__new__(Ownership)
    known.live = live
    return known


@given(ids, st.integers(0, 9), st.text(min_size=1, max_size=20))
def test_a_coordinator_that_goes_moves_its_own_verifiers_alone(live: list[str], gone: int, verifier_id: str) -> None:
    before = among(*live).owner(verifier_id)
    assert among(*reversed(live)).owner(verifier_id) == before
    left = [one for one in live if one != live[gone % len(live)]]
    after = among(*left).owner(verifier_id)
    assert after == before or before not in left


def test_shares_are_even() -> None:
    for count in (2, 4, 10):
        known = among(*(f"{i:016x}" for i in range(count)))
        shares = Counter(known.owner(f"verifier-{i}") for i in range(1_000))
        assert len(shares) == count
        assert max(shares.values()) < 1.35 * 1_000 / count


@pytest.fixture
async def store(redis):
    made = RedisStore(redis.url)
    yield made
    await made.close()


async def test_a_coordinator_that_beats_no_more_is_missed_within_its_lease(store) -> None:
    first, second = Ownership(store), Ownership(store)
    assert not await first.beat()  # alone, as it took itself to be
    assert await second.beat()
    assert await first.beat()
    assert first.live == second.live == sorted((first.id, second.id))
    begun = time.monotonic()

    async def alone() -> bool:
        await second.beat()
        return second.live == [second.id]

    await until(alone, 3.0)
    assert time.monotonic() - begun <= LEASE_MS / 1e3 + 0.5
    await first.beat()
    await first.leave()
    await second.beat()
    assert second.live == [second.id]


async def test_what_is_handed_over_is_taken_once_and_the_last_one(store) -> None:
    first, second = Ownership(store), Ownership(store)
    await first.beat()
    await second.beat()
    await first.beat()
    theirs = next(name for name in map(str, range(100)) if first.owner(name) == second.id)
    for report in ("old", "new"):
        await first.hand_over(theirs, report)
    assert await second.taken() == {theirs: "new"}
    assert await second.taken() == {}


def test_a_report_and_decisions_read_back_as_they_were_written() -> None:
    new, bounds = {"a": WorkloadKey("t", "d", "", "w")}, {"": WindowBounds(Window(2, 4), pinned=True)}
    report = Report(bytes(range(256)), 2, new, bounds, 17.25)
    assert redis_codec.report_from_json(redis_codec.report_to_json(report)) == report
    decisions = (DECISION, replace(DECISION, session_id="other", window=Window(0, 2)))
    written = redis_codec.decisions_to_json(decisions)
    assert redis_codec.decisions_from_json("v", written) == tuple(replace(one, verifier_id="v") for one in decisions)
    for foreign in (None, "", "{}", "[[1, 2]]", "nonsense"):
        assert redis_codec.decisions_from_json("v", foreign) == ()
    for foreign in ("[", "[1, 2]", '["", 1, {"a": [1, 2, 3, 4, 5]}, {}, 0]'):
        with pytest.raises((TypeError, ValueError)):
            redis_codec.report_from_json(foreign)


async def test_directives_are_sent_with_their_own_decisions_alone(store) -> None:
    windows, owner, key = WindowStore(store), Ownership(store), keys.windows("", "v")
    assert await windows.last("v") == Decisions()
    await owner.beat()
    made = made_of(DECISION, 5.25)
    assert await windows.set_decisions("v", made, owner, keep_ms=60_000)
    assert await windows.last("v") == made
    # A coordinator of an earlier version writes the two fields that it knows.
    await store.call("test", [("HSET", key, "decisions", "[]", "reported", "6.250")])
    assert await windows.last("v") == Decisions("[]", b"", 0.0)
    for damaged in ("6.250", "6.250 x", "6.250 AAAA", "", "nonsense"):
        await store.call("test", [("HSET", key, "directives", damaged)])
        assert (await windows.last("v")).directives == b""


async def test_nobody_else_writes_what_an_owner_that_lives_has_decided(store) -> None:
    windows, first, second = WindowStore(store), Ownership(store), Ownership(store)

    async def write(who: Ownership, reported: float, reason: str) -> bool:
        made = made_of(replace(DECISION, reason=reason), reported)
        return await windows.set_decisions("v", made, who, keep_ms=60_000)

    async def stands() -> str:
        return (await windows.decisions(["v"]))["s"].reason

    await first.beat()
    await second.beat()
    assert await write(first, 10.0, "first")
    assert not await write(Ownership(store), 10.5, "one that has just started and knows of nobody")
    assert not await write(second, 11.0, "second")
    assert await write(first, 12.0, "again")
    assert await stands() == "again"
    second.live, second.read_at = [second.id], time.monotonic()  # the first one has stopped for longer than its lease
    first.read_at -= LEASE_MS / 1e3
    assert not await write(second, 11.5, "from an older report")
    assert await write(second, 13.0, "second")
    assert not await write(first, 14.0, "a zombie")  # as far as it knows it is alone
    assert await stands() == "second"


async def test_an_owner_that_lives_and_decides_no_more_is_followed_after_its_lease(store) -> None:
    windows, first, second = WindowStore(store), Ownership(store), Ownership(store)
    await first.beat()
    await second.beat()
    assert await windows.set_decisions("v", made_of(DECISION, 10.0), first, keep_ms=60_000)

    async def written() -> bool:
        await first.beat()
        await second.beat()
        return await windows.set_decisions("v", made_of(DECISION, 11.0), second, keep_ms=60_000)

    begun = time.monotonic()
    await until(written, 5.0)
    assert LEASE_MS / 1e3 - 0.1 < time.monotonic() - begun < LEASE_MS / 1e3 + 1.0


COST = {"step_cost_ms": {1: 30.0, 65: 33.2}, "session_cost_ms": 0.1}
LIVE = telemetry_pb2.SessionTelemetry(
    session_id="s", epoch=5, rtt_ms=20.0, acceptance_history=bytes([HIT] * 80 + [MISS] * 16), draft_ms=2.0
)


async def test_a_report_to_any_coordinator_is_decided_about_by_its_verifiers_owner_alone(start, store) -> None:
    peers = [await start() for _ in range(2)]
    await peers[0].join("v1")
    owners = []
    for peer in 4 * peers:
        begun = (await peer.report("v1", [LIVE], **COST)).store_unix

        async def decided(peer=peer, begun=begun) -> bool:
            answer = await peer.report("v1", [LIVE], **COST)
            return bool(answer.directives) and answer.decided_unix >= begun

        await until(decided)
        [owner] = await store.call("test", [("HGET", keys.windows("sha256:w", "v1"), "owner")])
        owners.append(owner)
    assert len({*owners[4:]}) == 1  # the first one was alone at first


async def test_a_coordinator_that_has_decided_nothing_yet_answers_with_what_another_one_has(start, monkeypatch) -> None:
    one = await start()
    await one.join("v1")
    begun = (await one.report("v1", [LIVE], **COST)).store_unix

    async def decided() -> bool:
        answer = await one.report("v1", [LIVE], **COST)
        return bool(answer.directives) and answer.decided_unix >= begun

    await until(decided)
    monkeypatch.setattr(handlers, "WAIT_S", 0.0)
    monkeypatch.setattr(Ownership, "owner", lambda self, verifier_id: self.id)
    assert (await (await start()).report("v1", [LIVE], **COST)).directives


async def test_another_coordinator_decides_when_the_owner_has_left(config, store) -> None:
    async with contextlib.AsyncExitStack() as stack:
        peers: dict[str, Peer] = {}
        leaving: dict[str, contextlib.AsyncExitStack] = {}
        for _ in range(2):
            before = {*await live(store)}
            leaving_now = await stack.enter_async_context(contextlib.AsyncExitStack())
            address = await leaving_now.enter_async_context(running(config()))
            link = await stack.enter_async_context(channels.channel(address))
            [new] = {*await live(store)} - before
            peers[new], leaving[new] = Peer(address, link), leaving_now
        asked = Ownership(store)
        asked.live = tuple(peers)
        owner = asked.owner("v1")
        other = peers[next(one for one in peers if one != owner)]
        await other.join("v1")

        async def decided_since(begun: float) -> bool:
            answer = await other.report("v1", [LIVE], **COST)
            return bool(answer.directives) and answer.decided_unix >= begun

        first = (await other.report("v1", [LIVE], **COST)).store_unix
        await until(lambda: decided_since(first))
        await leaving[owner].aclose()
        left, begun = (await other.report("v1", [LIVE], **COST)).store_unix, time.monotonic()
        await until(lambda: decided_since(left))
        assert time.monotonic() - begun < 3.0


async def live(store: RedisStore) -> list[str]:
    [ids] = await store.call("test", [("ZRANGE", keys.COORDINATORS, 0, -1)])
    return list(map(str, ids))


@pytest.fixture(scope="module")
def redis_of_schedules():
    with EmbeddedServer() as server:
        yield server


STEP_MS = 200
steps = st.lists(
    st.tuples(st.sampled_from(["beat", "beat", "write", "write", "all beat"]), st.integers(0, 2)),
    min_size=5,
    max_size=60,
)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_two_write_within_a_lease_only_if_the_first_has_stopped(redis_of_schedules, schedule) -> None:
    asyncio.run(scheduled(redis_of_schedules.url, schedule))


async def scheduled(url: str, schedule: list[tuple[str, int]]) -> None:
    """Let three coordinators renew their leases or not, and write; a step lasts 200 ms of all clocks."""
    store, now = RedisStore(url), 0
    client = redis_client.Redis.from_url(url, decode_responses=True)
    client.flushall()
    windows, each = WindowStore(store), [Ownership(store) for _ in range(3)]
    beaten, last = [-math.inf] * 3, (-1, -math.inf)
    seen = [(-math.inf, tuple(beaten))] * 3  # when each has read the list, and who had beaten when by then
    try:
        for number, (what, who) in enumerate(schedule):
            for i in range(3) if what == "all beat" else [who] if what == "beat" else []:
                seen[i] = now, tuple(beaten)
                await each[i].beat()
                beaten[i] = now
            if what == "write" and await windows.set_decisions(
                "v", made_of(DECISION, number), each[who], keep_ms=60_000
            ):
                before, at = last
                if before not in (-1, who) and now - at < LEASE_MS - STEP_MS:
                    # Who has stopped for a lease may be replaced, by whoever has read the list since then.
                    read, then = seen[who]
                    assert read > at
                    assert read - then[before] >= LEASE_MS - STEP_MS
                last = who, now
            now += STEP_MS
            for name, end in client.zrange(keys.COORDINATORS, 0, -1, withscores=True):
                client.zadd(keys.COORDINATORS, {name: end - STEP_MS})
            if client.exists(keys.windows("", "v")):
                client.hincrby(keys.windows("", "v"), "until", -STEP_MS)
            for one in each:
                one.read_at -= STEP_MS / 1e3
    finally:
        client.close()
        await store.close()
