"""Test that tenants share places fairly, and that the limits which operators set hold."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
from unittest import mock

import grpc
import pytest
import redis as redis_client
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.store import keys, quotas, sessions
from coordinator.store.embedded_redis import EmbeddedServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.sessions import SessionStore
from coordinator.store.verifiers import VerifierStore
from outrider.core.errors import BadRequest, NotFound, Overloaded
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.ticket import Claims, Target
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

KEYS = {name: f"key-of-{name}-0123456789" for name in ("acme", "bobs", "cyan")}


class Tenants:
    """Open and close sessions as one tenant or another."""

    def __init__(self, coordinator, redis) -> None:
        self.coordinator = coordinator
        self.store = redis_client.Redis.from_url(redis.url, decode_responses=True)

    async def open(self, tenant: str):
        metadata = self.metadata(tenant)
        return await self.coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=metadata)

    async def resume(self, tenant: str, opened):
        request = pb.ResumeSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        return await self.coordinator.sessions.ResumeSession(request, metadata=self.metadata(tenant))

    async def close(self, tenant: str, opened) -> None:
        request = pb.CloseSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        await self.coordinator.sessions.CloseSession(request, metadata=self.metadata(tenant))

    async def limit(self, tenant: str, *, defaults: bool = False, **limits: int) -> pb.Tenant:
        request = pb.UpdateTenantRequest(
            action="TENANT_ACTION_SET_LIMITS", name=tenant, limits=pb.TenantLimits(**limits), defaults=defaults
        )
        return (await self.coordinator.admin.UpdateTenant(request)).tenant

    async def shown(self, tenant: str) -> pb.Tenant:
        listed = await self.coordinator.admin.ListTenants(pb.ListTenantsRequest())
        return next(one for one in listed.tenants if one.name == tenant)

    def metadata(self, tenant: str):
        return (("authorization", f"Bearer {KEYS[tenant]}"),)

    def pass_time(self, tenant: str, seconds: float) -> None:
        """Have what the tenant has used count as if it were so much older."""
        self.store.hincrby(keys.tenant_use(tenant), "at", -int(1000 * seconds))


@pytest.fixture
async def tenants(start, redis, monkeypatch) -> Tenants:
    monkeypatch.setattr(quotas, "WAIT_MS", 60_000)  # whatever the machine's speed
    coordinator = await start(tenant_keys=KEYS, attach_grace_ms=60_000)
    await coordinator.join("v1", capacity=4)
    return Tenants(coordinator, redis)


async def test_a_place_that_is_freed_goes_to_the_tenant_that_waits_and_not_to_the_one_that_floods(tenants, refused):
    taken = [await tenants.open("acme") for _ in range(4)]
    assert isinstance(await refused(tenants.open("bobs")), Overloaded)
    await tenants.close("acme", taken[0])
    for _ in range(20):
        error = await refused(tenants.open("acme"))
        assert isinstance(error, Overloaded)
        assert "tenant acme has 3 places, and a tenant with fewer waits" in str(error)
        assert error.retry_after_s == 1.0
    await tenants.open("bobs")
    await tenants.close("acme", taken[1])
    assert isinstance(await refused(tenants.open("acme")), Overloaded)  # bobs waits on, with 1 place to 2
    await tenants.open("bobs")


async def test_who_asks_no_more_does_not_wait(tenants, refused, monkeypatch):
    monkeypatch.setattr(quotas, "WAIT_MS", 20)
    taken = [await tenants.open("acme") for _ in range(4)]
    await refused(tenants.open("bobs"))
    await tenants.close("acme", taken[0])
    await asyncio.sleep(0.04)
    await tenants.open("acme")


async def test_a_running_session_moves_whatever_its_tenant_has_used(tenants, refused):
    running = [await tenants.open("acme") for _ in range(4)]
    await refused(tenants.open("bobs"))
    reports = [SessionTelemetry(session_id=one.session_id, tenant="acme") for one in running]
    await tenants.coordinator.report("v1", reports)
    await tenants.limit("acme", max_places=4, opens_per_minute=1, tokens_per_minute=1)
    await tenants.coordinator.registry.Report(report_of({"acme": 10_000}, reports))
    await tenants.coordinator.join("v1", capacity=8, instance=2)  # the verifier was started anew: nobody has a place
    for one in running:
        assert (await tenants.resume("acme", one)).session_id == one.session_id
    assert isinstance(await refused(tenants.open("acme")), Overloaded)


async def test_a_session_that_moves_again_and_again_is_taken_for_a_new_one(tenants, refused, monkeypatch):
    monkeypatch.setattr(quotas, "MOST_MOVES", 3)
    opened = await tenants.open("acme")
    await tenants.limit("acme", opens_per_minute=1)
    for _ in range(3):
        await tenants.coordinator.report("v1", [SessionTelemetry(session_id=opened.session_id, tenant="acme")])
        await tenants.resume("acme", opened)
    assert "more than its 1 sessions per minute" in str(await refused(tenants.resume("acme", opened)))


async def test_a_session_that_never_attached_moves_as_a_new_one(tenants, refused):
    opened = await tenants.open("acme")
    await tenants.limit("acme", opens_per_minute=1)
    assert "more than its 1 sessions per minute" in str(await refused(tenants.resume("acme", opened)))


async def test_a_burst_beyond_the_rate_is_refused_until_the_time_that_is_named(tenants, refused):
    await tenants.limit("acme", opens_per_minute=3)
    for _ in range(3):
        await tenants.close("acme", await tenants.open("acme"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tenants.open("acme")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = await refused(tenants.open("acme"))
    assert isinstance(error, Overloaded)
    assert "tenant acme opens more than its 3 sessions per minute; ask again in" in str(error)
    assert 0 < error.retry_after_s <= 20.0
    await tenants.open("bobs")
    tenants.pass_time("acme", error.retry_after_s + 0.01)
    await tenants.open("acme")
    assert isinstance(await refused(tenants.open("acme")), Overloaded)


async def test_verifiers_are_told_who_has_used_its_tokens_up_until_it_has_not(tenants):
    await tenants.coordinator.join("v2")
    await tenants.limit("acme", tokens_per_minute=100)
    assert (await tenants.coordinator.registry.Report(report_of({"acme": 99}))).exhausted_tenants == []
    for tokens in (300, 0):
        assert (await tenants.coordinator.registry.Report(report_of({"acme": tokens}))).exhausted_tenants == ["acme"]
    assert (await tenants.coordinator.report("v2")).exhausted_tenants == ["acme"]
    tenants.pass_time("acme", 600)
    assert (await tenants.coordinator.registry.Report(report_of({"acme": 1}))).exhausted_tenants == []
    await tenants.coordinator.registry.Report(report_of({"acme": 300}))
    await tenants.limit("acme", tokens_per_minute=0)
    assert (await tenants.coordinator.report("v2")).exhausted_tenants == []


async def test_verifiers_are_told_that_tenants_wait_and_tickets_until_when_a_place_is_kept(start, redis, refused):
    coordinator = await start(tenant_keys=KEYS, attach_grace_ms=5_000)
    await coordinator.join("v1", capacity=2)
    await coordinator.join("v2", capacity=2)
    tenants = Tenants(coordinator, redis)
    opened = [await tenants.open("acme") for _ in range(4)]
    before = await coordinator.report("v1")
    assert not before.contended
    await refused(tenants.open("bobs"))
    after = await coordinator.report("v1")
    assert after.contended
    assert before.store_unix <= after.store_unix < before.store_unix + 60
    claims = coordinator.read(opened[-1].primary)
    assert after.store_unix - 60 < claims.place_until_unix <= after.store_unix + 5
    assert opened[0].HasField("standby")
    assert coordinator.read(opened[0].standby).place_until_unix == 0.0


async def test_tokens_of_a_report_whose_answer_was_lost_count_once(tenants):
    async def report(tokens: int, sequence: int, instance: int = 1) -> float:
        request = pb.ReportRequest(verifier_id="v1", instance=instance, tenant_tokens={"acme": tokens})
        request.tokens_sequence = sequence
        assert (await tenants.coordinator.registry.Report(request)).known
        return round((await tenants.shown("acme")).use.tokens, -1)

    await tenants.limit("acme", tokens_per_minute=60)
    assert await report(1_000, 1) == pytest.approx(1_000, abs=200)
    for _ in range(3):
        assert await report(1_000, 1) == pytest.approx(1_000, abs=200)
    await tenants.coordinator.join("v1", capacity=4)  # the lease was lost meanwhile
    assert await report(1_000, 1) == pytest.approx(1_000, abs=200)
    assert await report(2_000, 2) == pytest.approx(3_000, abs=200)
    assert await report(1_000, 1) == pytest.approx(3_000, abs=200)  # it was on its way for long
    await tenants.coordinator.join("v1", capacity=4, instance=2)
    assert await report(500, 1, instance=2) == pytest.approx(3_500, abs=200)


async def test_tokens_keep_a_tenant_out_for_an_hour_at_most(tenants, refused):
    await tenants.limit("acme", tokens_per_minute=1)
    await tenants.coordinator.registry.Report(report_of({"acme": 1_000_000}))
    error = await refused(tenants.open("acme"))
    assert error.retry_after_s == 3_600.0
    assert (await tenants.shown("acme")).use.tokens == pytest.approx(61, abs=1)


@pytest.mark.parametrize("tokens", [{"a b": 1}, {"": 1}, {"acme": 2**41}])
async def test_tokens_out_of_bounds_are_refused(tenants, refused, tokens):
    assert isinstance(await refused(tenants.coordinator.registry.Report(report_of(tokens))), BadRequest)


async def test_a_killed_session_gives_its_tenants_place_back(tenants, refused):
    await tenants.limit("acme", max_places=1)
    opened = await tenants.open("acme")
    await refused(tenants.open("acme"))
    await tenants.coordinator.admin.UpdateSession(
        pb.UpdateSessionRequest(session_id=opened.session_id, action="SESSION_ACTION_KILL")
    )
    await tenants.open("acme")


async def test_the_ticket_carries_the_limit_of_streams(tenants):
    assert tenants.coordinator.read((await tenants.open("acme")).primary).max_streams == 0
    await tenants.limit("acme", max_streams=3)
    opened = await tenants.open("acme")
    assert tenants.coordinator.read(opened.primary).max_streams == 3
    assert tenants.coordinator.read((await tenants.resume("acme", opened)).primary).max_streams == 3
    assert tenants.coordinator.read((await tenants.open("bobs")).primary).max_streams == 0
    await tenants.limit("bobs", max_places=9, max_streams=30)  # more streams than places are none of its own
    assert tenants.coordinator.read((await tenants.open("bobs")).primary).max_streams == 9


def limits_of(places: int, opens: int, tokens: int, streams: int) -> pb.TenantLimits:
    return pb.TenantLimits(max_places=places, opens_per_minute=opens, tokens_per_minute=tokens, max_streams=streams)


async def test_limits_stay_as_they_are_until_they_are_set_or_the_settings_hold_again(start, redis, refused):
    coordinator = await start(tenant_keys=KEYS, defaults=limits_of(7, 30, 0, 0))
    tenants = Tenants(coordinator, redis)
    assert (await tenants.shown("acme")).limits == limits_of(7, 30, 0, 0)
    await tenants.limit("acme", tokens_per_minute=500, max_places=0)
    assert (await tenants.limit("acme", max_streams=2)).limits == limits_of(0, 30, 500, 2)
    assert (await tenants.shown("acme")).limits == limits_of(0, 30, 500, 2)
    assert (await tenants.shown("bobs")).limits == limits_of(7, 30, 0, 0)
    assert (await tenants.limit("acme", defaults=True, max_streams=5)).limits == limits_of(7, 30, 0, 5)
    assert isinstance(await refused(tenants.limit("nobody", max_places=1)), NotFound)
    assert isinstance(await refused(tenants.limit("acme", max_places=1_000_001)), BadRequest)


async def test_a_created_tenant_has_its_limits_at_once_and_keeps_them_under_a_new_key(tenants):
    admin, store = tenants.coordinator.admin, tenants.store
    request = pb.UpdateTenantRequest(action="TENANT_ACTION_CREATE", name="dora", limits=pb.TenantLimits(max_places=3))
    assert (await admin.UpdateTenant(request)).tenant.limits.max_places == 3
    await admin.UpdateTenant(pb.UpdateTenantRequest(action="TENANT_ACTION_REVOKE", name="dora"))
    assert (
        await admin.UpdateTenant(pb.UpdateTenantRequest(action="TENANT_ACTION_CREATE", name="dora"))
    ).tenant.limits.max_places == 3
    assert (await tenants.shown("dora")).limits.max_places == 3
    assert store.hget(keys.TENANT_LIMITS, "dora") == pb.TenantLimits(max_places=3).SerializeToString().decode()


async def test_a_flood_that_is_refused_leaves_nothing_in_redis(tenants, refused):
    for _ in range(4):
        await tenants.open("acme")
    await refused(tenants.open("bobs"))
    await refused(tenants.open("acme"))

    def sizes() -> tuple[int, int]:
        store = tenants.store
        return store.dbsize(), sum(store.memory_usage(key) for key in store.scan_iter())

    before = sizes()
    for outcome in await asyncio.gather(*(tenants.open("acme") for _ in range(200)), return_exceptions=True):
        assert isinstance(outcome, grpc.aio.AioRpcError)
    after = sizes()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 200  # bytes


async def test_where_nobody_needs_a_key_there_are_no_limits(start, redis, refused):
    coordinator = await start(defaults=limits_of(1, 1, 0, 1))
    await coordinator.join("v1", capacity=4)
    opened = [await coordinator.open() for _ in range(4)]
    assert coordinator.read(opened[0].primary).max_streams == 0
    assert "full" in str(await refused(coordinator.open()))
    store = redis_client.Redis.from_url(redis.url, decode_responses=True)
    assert not [key for key in store.scan_iter() if "tenant" in key or "waiting" in key]


def report_of(tokens: dict[str, int], sessions=()) -> pb.ReportRequest:
    return pb.ReportRequest(verifier_id="v1", instance=1, sessions=sessions, tenant_tokens=tokens)


@pytest.fixture(scope="module")
def redis_of_simulations():
    with EmbeddedServer() as server:
        yield server


def max_min(capacity: int, appetites: list[int]) -> list[int]:
    """Return what each gets if places are given out one by one, each to the one with the fewest who wants more."""
    shares = [0] * len(appetites)
    for _ in range(capacity):
        hungry = [i for i, appetite in enumerate(appetites) if shares[i] < appetite]
        if hungry:
            shares[min(hungry, key=lambda i: shares[i])] += 1
    return shares


@settings(max_examples=50 if os.environ.get("OUTRIDER_NIGHTLY") else 3)
@given(st.integers(1, 8), st.lists(st.integers(1, 12), min_size=2, max_size=5), st.integers(0, 2**32))
def test_however_it_begins_places_come_to_the_max_min_fair_shares(redis_of_simulations, capacity, appetites, seed):
    unhurried = mock.patch.object(sessions, "ATTACH_GRACE_MS", 600_000)  # a busy machine takes its time
    with unhurried, mock.patch.multiple(quotas, WAIT_MS=600_000, DEFAULTS=limits_of(0, 0, 0, 0)):
        asyncio.run(simulated(redis_of_simulations, capacity, appetites, random.Random(seed)))


async def simulated(redis, capacity: int, appetites: list[int], chance: random.Random) -> None:
    """Let the first tenant take what it wants, then all ask while sessions end, and compare with the fair shares."""
    server = redis_client.Redis.from_url(redis.url)
    server.flushall()
    held: list[list[str]] = [[] for _ in appetites]
    async with contextlib.aclosing(closing(RedisStore(redis.url))) as stores:
        store = await anext(stores)
        number = itertools.count()
        places, target = SessionStore(store), Target("demo", "w", "t")
        registration = pb.RegisterRequest(
            verifier_id="v1",
            address="127.0.0.1:1",
            target=session_pb2.TargetIdentity(**vars(target)),
            capacity_sessions=capacity,
            instance=1,
        )
        await VerifierStore(store).register(registration, 600_000)

        def claims_of(i: int, name: str) -> Claims:
            claims = Claims(name, f"tenant-{i}", "v1", 0, 0, 0.0, SessionLimits(), target)
            return dataclasses.replace(claims, api_key_id="key")

        async def opens(i: int) -> bool:
            claims = claims_of(i, f"s{next(number)}")
            try:
                placed, _ = await places.place(claims, ["v1"], (), "")
            except Overloaded:
                return False
            if placed is not None:
                held[i].append(claims.session_id)
            return placed is not None

        async def all_ask() -> None:
            hungry = [i for i, appetite in enumerate(appetites) for _ in range(appetite - len(held[i]))]
            chance.shuffle(hungry)
            for i in hungry:
                before = [len(one) for one in held]
                if await opens(i):
                    assert not any(before[j] < before[i] for j in waiting), (before, i, waiting)
                else:
                    waiting.add(i)

        waiting: set[int] = set()
        while len(held[0]) < appetites[0] and await opens(0):
            pass
        for _ in range(8 * capacity):
            server.delete(keys.waiting("demo"))  # so much time has passed
            waiting.clear()
            await all_ask()
            if live := [(i, name) for i, names in enumerate(held) for name in names]:
                i, name = chance.choice(live)
                held[i].remove(name)
                await places.close(claims_of(i, name), keep_ms=60_000)
            await all_ask()
        shares = max_min(capacity, appetites)
        assert sum(map(len, held)) == sum(shares)
        assert all(abs(len(names) - share) <= 1 for names, share in zip(held, shares, strict=True)), (held, shares)


async def closing(store: RedisStore):
    try:
        yield store
    finally:
        await store.close()
