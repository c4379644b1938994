"""Test releases over real gRPC and a real Redis: published, offered, measured, decided, lost and restored."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

import pytest
import redis as redis_client
from peers import until
from releasing import (
    SIGNER,
    device_of,
    drafted,
    listed,
    name_of,
    offered,
    placed,
    publish,
    signed,
    states,
    steer,
    version_of,
)

from coordinator.releases.lifecycle import in_canary
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import BadRequest, ModelRefused, Unavailable
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

CANDIDATE, CANARY, STABLE = pb.RELEASE_STATE_CANDIDATE, pb.RELEASE_STATE_CANARY, pb.RELEASE_STATE_STABLE
SUPERSEDED, ROLLED_BACK = pb.RELEASE_STATE_SUPERSEDED, pb.RELEASE_STATE_ROLLED_BACK
PROMOTE, ROLL_BACK = pb.RELEASE_ACTION_PROMOTE, pb.RELEASE_ACTION_ROLL_BACK
SHARE = 0.25


async def stable(peer, version: int = 1) -> None:
    assert await publish(peer, signed(version)) == CANARY
    assert (await steer(peer, version, PROMOTE)).state == STABLE


async def measured(
    peer, version: int, canary: float, beside: float, *, sessions: int = 60, other: int = 1, key: str = "", **changes
) -> None:
    """Place and report so many sessions a side, each with one span of proposals."""
    rng, trial = random.Random(1), name_of(version)
    sides = []
    for name, mean in ((trial, canary), (name_of(other), beside)):
        device = device_of(trial, canary=name == trial)
        sides.append((await placed(peer, sessions, key, device_id=device, target="demo"), name, mean))
    found = [
        drafted(ids[i], name, sum(rng.random() < mean for _ in range(40)), 40, **changes)
        for i in range(sessions)
        for ids, name, mean in sides
    ]
    await peer.report("v1", found)


async def reaches(peer, version: int, state: int) -> None:
    async def there() -> bool:
        return (await states(peer)).get(version) == state

    await until(there)


# --- what devices are offereded


async def test_a_canary_goes_to_its_share_of_the_devices_and_stays_with_them(coordinator) -> None:
    await stable(coordinator)
    await publish(coordinator, signed(2))
    devices = [f"device-{i}" for i in range(200)]
    offers = {device: await offered(coordinator, device) for device in devices}
    tries = {device for device in devices if offers[device].canary}
    assert tries == {device for device in devices if in_canary(device, name_of(2), SHARE)}
    assert 25 <= len(tries) <= 75
    assert {version_of(offers[d]) for d in tries} == {2}
    assert {version_of(offers[d]) for d in devices if d not in tries} == {1}
    assert offers["device-0"].manifest in (signed(1), signed(2))  # byte for byte as it was signed
    assert all([(await offered(coordinator, device)).canary for device in sorted(tries)])


async def test_another_targets_release_is_not_offered(coordinator) -> None:
    await stable(coordinator)
    assert version_of(await offered(coordinator)) == 1
    assert version_of(await offered(coordinator, target="sha256:x")) == 0


async def test_the_serial_grows_with_every_change_and_reaches_sessions_and_verifiers(coordinator) -> None:
    await coordinator.join("v1")
    serials = [0]
    await publish(coordinator, signed(1))
    for change in (None, PROMOTE):
        if change is not None:
            await steer(coordinator, 1, change)
        serials.append((await offered(coordinator)).serial)
        opened = await coordinator.open()
        assert opened.release_serial == serials[-1]
        assert (await coordinator.resume(opened)).release_serial == serials[-1]
        assert (await coordinator.report("v1")).release_serial == serials[-1]
    assert serials == sorted(set(serials))
    await publish(coordinator, signed(1))
    assert (await offered(coordinator)).serial == serials[-1]


@pytest.mark.parametrize("device", ["a b", "x" * 65, "{outrider}"])
async def test_a_device_of_a_senseless_name_is_refused(coordinator, refused, device) -> None:
    assert isinstance(await refused(offered(coordinator, device)), BadRequest)


# --- what is refused


async def test_a_draft_of_another_vocabulary_is_refused_and_one_for_a_target_that_is_down_is_not(
    coordinator, refused
) -> None:
    await coordinator.join("v1")
    error = await refused(publish(coordinator, signed(1, tokenizer_hash="sha256:other")))
    assert isinstance(error, BadRequest)
    assert "manifest.tokenizer_hash is 'sha256:other', and target 'demo' has 'sha256:t'" in str(error)
    assert await publish(coordinator, signed(1, weights_hash="sha256:down", tokenizer_hash="sha256:other")) == CANARY


@pytest.mark.parametrize("raw", [b"", b"junk" * 9, signed(1)[:-3]])
async def test_what_is_no_manifest_is_refused(coordinator, refused, raw) -> None:
    assert isinstance(await refused(publish(coordinator, raw)), BadRequest)
    assert await listed(coordinator) == []


async def test_only_listed_publishers_are_taken_where_there_is_a_list(start, tmp_path, refused) -> None:
    path = tmp_path / "publishers"
    path.write_text(f"# ours\n{SIGNER.public_key.hex()}\n")
    coordinator = await start(release_keys=f"{path},{Signer.generate().public_key.hex()}")
    untrusted = Signer.generate()
    error = await refused(publish(coordinator, signed(1, untrusted)))
    assert isinstance(error, ModelRefused)
    assert untrusted.key_id in str(error)
    assert await publish(coordinator, signed(1)) == CANARY


# --- files


async def test_a_release_whose_file_is_missing_short_or_damaged_is_refused_where_files_are_served(
    start, tmp_path, refused
) -> None:
    folder = tmp_path / "artifacts"
    coordinator = await start(artifacts=folder, http="127.0.0.1:0")
    content = b"GGUF" * 1_000
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{digest}.gguf"

    def of(**changes) -> bytes:
        return signed(1, **{"artifact": f"sha256:{digest}", "size": len(content), **changes})

    assert f"{digest}.gguf is not in" in str(await refused(publish(coordinator, of())))
    path.write_bytes(content[:-1])
    assert "manifest.size is 4000, must be 3999 bytes" in str(await refused(publish(coordinator, of())))
    path.write_bytes(content[:-1] + b"?")
    assert "damaged or another file" in str(await refused(publish(coordinator, of())))
    path.write_bytes(content)
    assert await publish(coordinator, of()) == CANARY
    elsewhere = signed(2, urls=("https://example.org/draft.gguf",))
    assert await publish(coordinator, elsewhere) == CANDIDATE
    offer = next(o for o in [await offered(coordinator, f"d{i}") for i in range(64)] if o.manifest)
    assert offer.base_url.startswith("http://127.0.0.1:")


# --- what verifiers measure decides


@pytest.fixture
async def trial(start):
    """Publish a stable release and a canary on a verifier of their target; return the peer."""
    coordinator = await start(canary={"window_s": 600.0})
    await coordinator.join("v1", capacity=500)
    await stable(coordinator)
    assert await publish(coordinator, signed(2)) == CANARY
    return coordinator


async def test_a_worse_draft_is_rolled_back_and_devices_return_to_the_stable_one(trial) -> None:
    await measured(trial, 2, canary=0.3, beside=0.7)
    await reaches(trial, 2, ROLLED_BACK)
    assert version_of(await offered(trial, "d")) == 1
    shown = (await listed(trial, name_of(2)))[0]
    assert "worse than the bound" in shown.reason
    assert shown.evidence.canary_samples == shown.evidence.stable_samples == 60
    assert shown.evidence.canary_acceptance < 0.4 < 0.6 < shown.evidence.stable_acceptance
    assert shown.evidence.log_worse > 4.6


async def test_a_better_draft_becomes_stable_for_all(trial) -> None:
    await measured(trial, 2, canary=0.8, beside=0.4)
    await reaches(trial, 2, STABLE)
    assert (await states(trial))[1] == SUPERSEDED
    offer = await offered(trial, "anybody")
    assert (version_of(offer), offer.canary) == (2, False)


async def test_a_session_that_is_resumed_keeps_its_arm(trial) -> None:
    opened = await trial.open(device_id=device_of(name_of(2), canary=True), draft_release=name_of(2))
    await trial.resume(opened)
    await measured(trial, 2, canary=0.5, beside=0.5, sessions=1)
    await trial.report("v1", [drafted(opened.session_id, name_of(2), 20, 40)])
    [other] = await placed(trial, 1, device_id=device_of(name_of(2), canary=False))
    await trial.report("v1", [drafted(other, name_of(1), 20, 40)])

    async def seen() -> bool:
        return (await listed(trial, name_of(2)))[0].evidence.canary_samples == 2

    await until(seen)


# --- several tenants, of which one may lie


async def evidence_of(peer) -> pb.ReleaseEvidence:
    return (await listed(peer, name_of(2)))[0].evidence


async def test_creating_a_tenant_ends_the_trust_in_one(trial) -> None:
    assert (await evidence_of(trial)).tenants_needed == 1
    await trial.admin.UpdateTenant(pb.UpdateTenantRequest(action="TENANT_ACTION_CREATE", name="acme"))
    assert (await evidence_of(trial)).tenants_needed == 3


# --- several coordinators, and a store that forgets


async def test_publishing_at_many_coordinators_at_once_leaves_one_canary(start) -> None:
    peers = [await start() for _ in range(3)]
    results = await asyncio.gather(
        *(publish(peer, signed(version)) for version in range(1, 9) for peer in peers), return_exceptions=True
    )
    assert any(result == CANARY for result in results)
    found = await states(peers[0])
    assert list(found.values()).count(CANARY) == 1
    assert max(found) == 8
    assert found[8] in (CANARY, CANDIDATE)


async def test_what_redis_lost_is_put_back_with_what_was_decided(trial, redis, refused) -> None:
    await steer(trial, 2, ROLL_BACK)
    serial = (await offered(trial)).serial
    redis.stop()
    assert type(await refused(offered(trial))) is Unavailable
    redis.start()
    await reaches(trial, 1, STABLE)
    assert (await states(trial))[2] == ROLLED_BACK
    assert (await offered(trial)).serial > serial
    assert await publish(trial, signed(2)) == ROLLED_BACK


async def test_a_coordinator_that_starts_anew_over_an_empty_redis_remembers(start, redis) -> None:
    await stable(await start(watch_s=30.0))  # kept at once, not at the next look
    redis.stop()
    redis.start()
    assert await states(await start()) == {1: STABLE}


async def test_the_trial_begins_again_where_its_samples_were_lost(start, redis) -> None:
    coordinator = await start(canary={"window_s": 600.0})
    await publish(coordinator, signed(1))
    began = (await listed(coordinator))[0].since_unix
    redis.stop()
    redis.start()
    await reaches(coordinator, 1, CANARY)
    assert began < (await listed(coordinator))[0].since_unix <= time.time()


async def test_reports_go_on_where_releases_cannot_be_read(trial, redis, monkeypatch) -> None:
    call = RedisStore.call

    async def broken(self, operation: str, commands: object) -> object:
        if operation == "release_serial":
            raise Unavailable("the store has just gone")
        return await call(self, operation, commands)

    monkeypatch.setattr(RedisStore, "call", broken)
    answer = await trial.report("v1", [drafted("s", name_of(2), 20, 40)])
    assert (answer.known, answer.release_serial) == (True, 0)


async def test_a_store_that_comes_back_older_gets_what_was_decided_since(trial, redis) -> None:
    store = redis_client.Redis.from_url(redis.url)
    before = store.hget(keys.RELEASES, "sha256:w")
    await steer(trial, 2, ROLL_BACK)
    serial = (await offered(trial)).serial
    store.hset(keys.RELEASES, "sha256:w", before)
    await reaches(trial, 2, ROLLED_BACK)
    assert await states(trial) == {1: STABLE, 2: ROLLED_BACK}
    assert (await offered(trial)).serial > serial


async def test_what_cannot_be_read_counts_as_lost_and_keeps_no_session_out(trial, redis) -> None:
    serial = (await offered(trial)).serial
    store = redis_client.Redis.from_url(redis.url)
    store.hset(keys.RELEASES, "sha256:w", b'{"weights": "\xff')
    store.set(keys.RELEASE_SERIAL, serial + 1)
    await trial.open()
    await reaches(trial, 1, STABLE)
    assert await states(trial) == {1: STABLE, 2: CANARY}


def test_the_draw_is_by_names_alone_and_keeps_whom_it_had() -> None:
    devices = [f"d{i}" for i in range(4_000)]
    few, many = ({d for d in devices if in_canary(d, "r", share)} for share in (0.1, 0.3))
    assert few < many
    assert abs(len(few) / len(devices) - 0.1) < 0.02
    other = {d for d in devices if in_canary(d, "another", 0.1)}
    assert len(few & other) < 0.25 * len(few)
    assert not in_canary("", "r", 0.99)


async def test_a_promotion_that_was_made_is_not_refused_because_redis_dies_then(coordinator, redis, monkeypatch):
    """An operator would promote again, and give a canary to all devices without a trial."""
    await publish(coordinator, signed(1))
    change = RedisStore.change

    async def change_twice_and_die(self, *arguments: object) -> object:
        await change(self, *arguments)
        track = await change(self, *arguments)  # as the client does when the first reply was lost
        redis.stop()
        return track

    monkeypatch.setattr(RedisStore, "change", change_twice_and_die)
    assert (await steer(coordinator, 1, PROMOTE)).state == STABLE
