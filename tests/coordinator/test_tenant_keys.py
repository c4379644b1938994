"""Test tenants that operators create while coordinators run."""

from __future__ import annotations

import asyncio

import pytest
import redis as redis_client
from peers import revoked, until

from coordinator.api.authentication import Authenticator, api_key_id, digest
from coordinator.api.tenant_keys import MARKER
from coordinator.config import CoordinatorConfig
from coordinator.store import keys, revocations
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import BadRequest, Overloaded, Unauthenticated
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

ADMIN = "admin-token-0123456789"
GIVEN = "given-key-0123456789"


def bearing(secret: str):
    return (("authorization", f"Bearer {secret}"),)


async def create(coordinator, name: str, metadata=()) -> pb.UpdateTenantResponse:
    return await coordinator.admin.UpdateTenant(
        pb.UpdateTenantRequest(action="TENANT_ACTION_CREATE", name=name), metadata=metadata
    )


async def revoke(coordinator, name: str) -> pb.Tenant:
    return (
        await coordinator.admin.UpdateTenant(pb.UpdateTenantRequest(action="TENANT_ACTION_REVOKE", name=name))
    ).tenant


async def listed(coordinator, **request) -> pb.ListTenantsResponse:
    return await coordinator.admin.ListTenants(pb.ListTenantsRequest(**request))


async def open_as(coordinator, key: str):
    return await coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=bearing(key))


@pytest.fixture
async def cluster(start):
    """Start two coordinators over one store, and a verifier."""
    one, two = await start(), await start()
    await one.join("v1", capacity=50)
    return one, two


async def test_a_revoked_key_opens_nothing_at_any_coordinator_and_its_tickets_are_revoked(cluster, refused):
    one, two = cluster
    key = (await create(one, "acme")).key
    opened = await open_as(one, key)
    assert (await revoke(one, "acme")).revoked_unix > 0
    for coordinator in cluster:
        error = await refused(open_as(coordinator, key))
        assert isinstance(error, Unauthenticated)
        assert "unknown here" in str(error)
    api_key_id = one.read(opened.primary).api_key_id
    assert api_key_id and api_key_id not in key
    report = SessionTelemetry(session_id=opened.session_id, tenant="acme")
    for coordinator in cluster:
        assert revoked(await coordinator.report("v1", [report])) == [("api_key_id", api_key_id)]
    await revoke(two, "acme")  # again: there is no key to revoke
    assert len((await one.report("v1", [report])).revocations) == 1


async def test_a_key_that_was_made_anew_while_another_one_is_revoked_stays(cluster, refused, monkeypatch):
    one, two = cluster
    await create(one, "acme")
    add, made = revocations.add, []

    async def slowly(*arguments, **given):
        monkeypatch.setattr(revocations, "add", add)
        await add(*arguments, **given)
        await revoke(two, "acme")
        made.append((await create(two, "acme")).key)

    monkeypatch.setattr(revocations, "add", slowly)
    error = await refused(revoke(one, "acme"))
    assert isinstance(error, Overloaded) and "made anew meanwhile" in str(error)
    assert await open_as(one, made[0])


async def test_a_revoked_name_can_be_created_again_with_another_key(cluster, refused):
    one, two = cluster
    first = (await create(one, "acme")).key
    error = await refused(create(two, "acme"))
    assert isinstance(error, BadRequest)
    assert "outrider tenants revoke acme" in str(error)
    await revoke(one, "acme")
    await revoke(two, "acme")  # once more changes nothing
    second = (await create(two, "acme")).key
    assert second != first
    await open_as(one, second)
    assert isinstance(await refused(open_as(one, first)), Unauthenticated)


async def test_a_key_that_was_made_is_shown_although_redis_dies_then(cluster, redis, monkeypatch):
    change = RedisStore.change

    async def change_twice_and_die(self, *arguments: object) -> object:
        await change(self, *arguments)
        created = await change(self, *arguments)  # as the client does when the first reply was lost
        redis.stop()
        return created

    limits = pb.TenantLimits(max_places=3)
    request = pb.UpdateTenantRequest(action="TENANT_ACTION_CREATE", name="acme", limits=limits)
    with monkeypatch.context() as dying:
        dying.setattr(RedisStore, "change", change_twice_and_die)
        made = await cluster[0].admin.UpdateTenant(request)
    assert made.key and made.tenant.created_unix > 0
    assert (made.tenant.limits.max_places, made.tenant.limits.opens_per_minute) == (3, 6_000)


async def test_the_store_holds_no_key(cluster, redis):
    key = (await create(cluster[0], "acme")).key
    store = redis_client.Redis.from_url(redis.url)
    kept = {name: str(store.hgetall(name)) for name in (keys.TENANTS, keys.TENANT_KEYS)}
    assert all("acme" in said for said in kept.values())
    assert all(key not in said and key.removeprefix("outrider-") not in said for said in kept.values())
    assert len(key) >= 40


async def test_the_first_tenant_ends_anonymity_and_its_end_does_not_bring_it_back(cluster, refused):
    one, two = cluster
    await one.open()
    assert (await listed(one)).anonymous
    await create(one, "acme")
    for coordinator in cluster:
        assert isinstance(await refused(coordinator.open()), Unauthenticated)
        assert not (await listed(coordinator)).anonymous
    await revoke(one, "acme")
    assert isinstance(await refused(two.open()), Unauthenticated)


async def test_keys_of_the_settings_and_created_ones_are_good_beside_one_another(start, refused):
    coordinator = await start(tenant_keys={"given": GIVEN})
    await coordinator.join("v1", capacity=50)
    made = await create(coordinator, "made")
    tenants = [coordinator.read((await open_as(coordinator, key)).primary).tenant for key in (GIVEN, made.key)]
    assert tenants == ["given", "made"]
    found = (await listed(coordinator)).tenants
    assert [(t.name, t.configured, t.created_unix > 0) for t in found] == [
        ("given", True, False),
        ("made", False, True),
    ]
    assert "settings" in str(await refused(create(coordinator, "given")))
    error = await refused(revoke(coordinator, "given"))
    assert isinstance(error, BadRequest)
    assert "settings" in str(error)
    assert revoked(await coordinator.report("v1")) == [("api_key_id", api_key_id(digest(GIVEN)))]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "\x1b[2J", "x" * 65, "a\n"])
async def test_names_that_are_no_names_are_refused(coordinator, refused, name):
    for call in (create, revoke):
        assert isinstance(await refused(call(coordinator, name)), BadRequest)


async def test_a_created_tenant_is_not_recorded_whatever_others_let(start, tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text("[recording.default]\nshare = 1\nkeep_days = 30\nprompts = true\n")
    coordinator = await start(tenants_file=path)
    await coordinator.join("v1")
    assert coordinator.read((await coordinator.open()).primary).keep_s > 0
    key = (await create(coordinator, "acme")).key
    claims = coordinator.read((await open_as(coordinator, key)).primary)
    assert (claims.keep_s, claims.keep_prompts) == (0.0, False)


async def test_beyond_loopback_an_admin_token_stands_in_for_keys_and_nobody_is_anonymous():
    settings = {"listen": "0.0.0.0:7700", "join_token": "join-token-0123456789"}
    with pytest.raises(BadRequest, match=r"admin token.*OUTRIDER_COORDINATOR_ADMIN_TOKEN"):
        Authenticator(CoordinatorConfig(**settings))
    access = Authenticator(CoordinatorConfig(**settings, admin_token=ADMIN))
    assert not access.anonymous
    with pytest.raises(Unauthenticated, match="API key is missing"):
        await access.tenant(())
    with pytest.raises(Unauthenticated, match="unknown here"):
        await access.tenant(bearing("whatever-0123456789"))


async def test_lists_come_in_pages_by_name(coordinator, refused):
    for name in ("c", "a", "b"):
        await create(coordinator, name)
    first = await listed(coordinator, limit=2)
    assert ([t.name for t in first.tenants], first.next) == (["a", "b"], "b")
    rest = await listed(coordinator, limit=2, after=first.next)
    assert ([t.name for t in rest.tenants], rest.next) == (["c"], "")
    assert isinstance(await refused(listed(coordinator, limit=100_000)), BadRequest)
    assert isinstance(await refused(listed(coordinator, after="a b")), BadRequest)


async def test_where_there_are_too_many_those_that_were_revoked_are_forgotten(coordinator, refused, monkeypatch):
    monkeypatch.setattr("coordinator.api.tenant_keys.MAX_TENANTS", 2)
    await create(coordinator, "a")
    await create(coordinator, "b")
    error = await refused(create(coordinator, "c"))
    assert isinstance(error, BadRequest)
    assert "revoke one first" in str(error)
    await revoke(coordinator, "a")
    await create(coordinator, "c")
    assert [t.name for t in (await listed(coordinator)).tenants] == ["b", "c"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_callers_without_a_key_stay_outside_when_redis_has_lost_the_tenants(
    start, redis, refused, caplog, restarted
):
    coordinator = await start()
    key = (await create(coordinator, "acme")).key
    redis_client.Redis.from_url(redis.url).flushall()
    coordinator = await start() if restarted else coordinator
    await coordinator.join("v1")
    for call in (coordinator.open(), open_as(coordinator, key)):
        assert isinstance(await refused(call), Unauthenticated)
    assert not (await listed(coordinator)).anonymous
    await until(lambda: asyncio.sleep(0, "Redis has lost the tenants" in caplog.text))
    again = (await create(coordinator, "acme")).key
    assert (await open_as(coordinator, again)).session_id


async def test_a_coordinator_remembers_the_tenants_that_another_created(start, redis, refused, tmp_path):
    one, two = await start(state_dir=tmp_path / "one"), await start(state_dir=tmp_path / "two")
    await create(one, "acme")
    marker = tmp_path / "two" / MARKER
    await until(lambda: asyncio.sleep(0, marker.exists()))
    assert marker.stat().st_mode & 0o077 == 0
    redis_client.Redis.from_url(redis.url).flushall()
    assert isinstance(await refused(two.open()), Unauthenticated)
