"""Test releases of n-gram stores over real gRPC and a real Redis: for one tenant alone, and tried beside its drafts."""

from __future__ import annotations

import hashlib
import random

import pytest
from peers import until
from releasing import (
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

from outrider.core.errors import BadRequest
from outrider.core.telemetry import drafts_with, release_name
from outrider.wire import manifest as manifests
from outrider.wire.v1 import coordinator_pb2 as pb

CANARY, STABLE = pb.RELEASE_STATE_CANARY, pb.RELEASE_STATE_STABLE
ROLLED_BACK, PROMOTE = pb.RELEASE_STATE_ROLLED_BACK, pb.RELEASE_ACTION_PROMOTE
KEYS = {"acme": "a" * 24, "bolt": "b" * 24}


def store_of(tenant: str, version: int = 1) -> bytes:
    return signed(version, artifact=f"sha256:{digest_of(tenant, version)}", quantization="NGRAM", tenant=tenant)


def digest_of(tenant: str, version: int = 1) -> str:
    return hashlib.sha256(f"store {version} of {tenant}".encode()).hexdigest()


async def offered_store(peer, tenant: str = "", device: str = "d") -> pb.OfferReleaseResponse:
    metadata = (("authorization", f"Bearer {KEYS[tenant]}"),) if tenant else None
    request = pb.OfferReleaseRequest(target="sha256:w", device_id=device, store=True)
    return await peer.sessions.OfferRelease(request, metadata=metadata)


async def promote(peer, digest: str) -> int:
    request = pb.UpdateReleaseRequest(release=digest, action=PROMOTE)
    return (await peer.admin.UpdateRelease(request)).release.state


async def state_of(peer, digest: str) -> int:
    return (await listed(peer, digest))[0].state


async def test_a_tenants_store_is_offered_to_its_own_devices_alone(start) -> None:
    coordinator = await start(tenant_keys=KEYS, admin_token="", canary_share=0.999)
    for tenant in KEYS:
        assert await publish(coordinator, store_of(tenant)) == CANARY
        assert await promote(coordinator, digest_of(tenant)) == STABLE
    for tenant in KEYS:
        offer = await offered_store(coordinator, tenant)
        assert manifests.read_unverified(offer.manifest).tenant == tenant
    other = (("authorization", f"Bearer {KEYS['bolt']}"),)
    for forged in ("sha256:w\nacme", "sha256:w acme", "acme"):  # no target leads to another tenant's store
        for store in (False, True):
            request = pb.OfferReleaseRequest(target=forged, device_id="d", store=store)
            try:
                found = await coordinator.sessions.OfferRelease(request, metadata=other)
            except Exception as error:
                assert "INVALID_ARGUMENT" in str(error)
            else:
                assert not found.manifest


async def test_a_store_is_no_draft_and_a_draft_no_store(coordinator) -> None:
    await publish(coordinator, store_of("default"))
    await promote(coordinator, digest_of("default"))
    assert not (await offered(coordinator)).manifest
    await publish(coordinator, signed(1))
    await steer(coordinator, 1, PROMOTE)
    assert version_of(await offered(coordinator)) == 1
    assert manifests.read_unverified((await offered(coordinator)).manifest).tenant == ""
    assert manifests.read_unverified((await offered_store(coordinator)).manifest).tenant == "default"


async def test_versions_of_each_tenants_stores_and_of_drafts_are_counted_apart(coordinator, refused) -> None:
    await publish(coordinator, signed(7))
    assert await publish(coordinator, store_of("acme", 1)) == CANARY
    assert await publish(coordinator, store_of("bolt", 3)) == CANARY
    assert isinstance(await refused(publish(coordinator, store_of("bolt", 2))), BadRequest)
    assert sorted(await states(coordinator)) == [1, 3, 7]


@pytest.mark.parametrize("tenant", ["a\nb", "a b", "a/b", "x" * 65])
async def test_a_manifest_with_a_name_that_no_tenant_has_is_not_signed(tenant: str) -> None:
    with pytest.raises(BadRequest, match=r"manifest\.tenant"):
        store_of(tenant)


@pytest.fixture
async def trial(start):
    """Publish a draft that is stable, and a store on trial; return the peer."""
    coordinator = await start(canary_window_s=600.0)
    await coordinator.join("v1", capacity=500)
    await publish(coordinator, signed(1))
    await steer(coordinator, 1, PROMOTE)
    assert await publish(coordinator, store_of("default")) == CANARY
    return coordinator


async def measured(peer, canary: float, beside: float, tenant: str = "default", draft: str = "") -> None:
    """Place and report sessions with one draft, half of them with the store."""
    rng, draft, store = random.Random(1), draft or name_of(1), digest_of("default")

    def right(mean: float) -> int:
        return sum(rng.random() < mean for _ in range(40))

    tries, other = [await placed(peer, 60, store_device_id=device_of(store, canary=canary)) for canary in (True, False)]
    sides = [(tries, release_name(draft, store), canary), (other, draft, beside)]
    found = [drafted(ids[i], name, right(mean), 40, tenant=tenant) for i in range(60) for ids, name, mean in sides]
    await peer.report("v1", found)


@pytest.mark.parametrize("draft", ["", "ngram"])
async def test_a_store_with_which_proposals_are_worse_is_rolled_back(trial, draft: str) -> None:
    await measured(trial, canary=0.3, beside=0.7, draft=draft)

    async def over() -> bool:
        return await state_of(trial, digest_of("default")) == ROLLED_BACK

    await until(over)
    assert not (await offered_store(trial)).manifest


async def test_a_store_with_which_proposals_are_better_becomes_stable(trial) -> None:
    await measured(trial, canary=0.8, beside=0.4)

    async def over() -> bool:
        return await state_of(trial, digest_of("default")) == STABLE

    await until(over)
    assert version_of(await offered_store(trial, device="any")) == 1


async def test_other_tenants_sessions_say_nothing_about_a_store(trial) -> None:
    await measured(trial, canary=0.1, beside=0.9, tenant="bolt")
    await measured(trial, canary=0.8, beside=0.4)

    async def over() -> bool:
        return await state_of(trial, digest_of("default")) == STABLE

    await until(over)
    evidence = (await listed(trial, digest_of("default")))[0].evidence
    assert (evidence.canary_samples, evidence.stable_samples) == (60, 60)


async def test_a_draft_and_a_store_are_tried_by_the_same_sessions_at_once(trial) -> None:
    assert await publish(trial, signed(2)) == CANARY
    rng = random.Random(2)
    found, store = [], digest_of("default")
    for i in range(240):  # the new draft is worse, and the store is better
        new, with_store = i % 2 == 0, i % 4 < 2
        mean = 0.5 - 0.3 * new + 0.3 * with_store
        name = release_name(name_of(2 if new else 1), store if with_store else "")
        [session_id] = await placed(
            trial,
            1,
            device_id=device_of(name_of(2), canary=new),
            store_device_id=device_of(store, canary=with_store),
        )
        found.append(drafted(session_id, name, sum(rng.random() < mean for _ in range(40)), 40))
    await trial.report("v1", found)

    async def over() -> bool:
        return await state_of(trial, store) == STABLE and (await listed(trial, name_of(2)))[0].state == ROLLED_BACK

    await until(over)


async def test_a_store_is_served_under_its_own_suffix_and_by_its_hash(start, tmp_path, refused) -> None:
    import httpx

    folder = tmp_path / "artifacts"
    coordinator = await start(artifacts=folder, http="127.0.0.1:0", canary_share=0.999)
    content = b"n-grams" * 500
    digest = hashlib.sha256(content).hexdigest()
    raw = signed(1, artifact=f"sha256:{digest}", size=len(content), tenant="default")
    (folder / f"{digest}.gguf").write_bytes(content)
    assert f"{digest}.safetensors is not in" in str(await refused(publish(coordinator, raw)))
    (folder / f"{digest}.gguf").rename(folder / f"{digest}.safetensors")
    assert await publish(coordinator, raw) == CANARY
    base = (await offered_store(coordinator)).base_url.rstrip("/")
    async with httpx.AsyncClient() as client:
        for name in (digest, f"{digest}.safetensors"):
            answer = await client.get(f"{base}/artifacts/{name}")
            assert (answer.status_code, answer.content) == (200, content)
        assert (await client.get(f"{base}/artifacts/{digest}.gguf")).status_code == 404


def test_a_label_of_draft_and_store_names_both_and_no_other() -> None:
    draft, store, other = (hashlib.sha256(text).hexdigest() for text in (b"1", b"2", b"3"))
    both, alone = release_name(draft, store), release_name("ngram", store)
    assert len(both) == 64 and release_name(draft, "") == draft
    assert drafts_with(both, draft) and drafts_with(both, store) and not drafts_with(both, other)
    assert drafts_with(alone, store) and not drafts_with(alone, draft)
    assert drafts_with(draft, draft) and not drafts_with(draft, draft[:31]) and not drafts_with("", draft)
    assert not drafts_with(".", draft) and not drafts_with("a.b", draft)
