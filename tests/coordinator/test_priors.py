"""Test the priors of a workload key: they expire, count each observation once, and serve the key's next session."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as aioredis
from peers import identity

from coordinator import window
from coordinator.store import keys, verifiers
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import telemetry_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

COSTS = {"step_cost_ms": {1: 30.0, 65: 33.2}, "session_cost_ms": 0.1}
LOAD = VerifierTelemetry(**COSTS)
LIMITS = SessionLimits()
GOOD = bytes([HIT, HIT, HIT, HIT, SIBLING, HIT, HIT, MISS])
"""Three quarters of the first proposals are accepted, and half of the rest by a sibling."""
DRAFT = "a" * 64
KEY = keys.prior("sha256:w", "default", DRAFT, "")


def report(session_id: str, history: bytes, **changes: object) -> telemetry_pb2.SessionTelemetry:
    fields = {
        "epoch": 5,
        "committed": len(history),
        "acceptance_history": history,
        "draft_ms": 2.0,
        "nodes_per_level": 1.5,
    }
    return telemetry_pb2.SessionTelemetry(session_id=session_id, **(fields | changes))


async def kept(redis, key: str = KEY) -> bytes:
    async with aioredis.from_url(redis.url, decode_responses=True) as store:
        return (await store.hget(key, "acceptance_history") or "").encode()


@pytest.fixture
async def cluster(coordinator):
    await coordinator.join("v1", capacity=64)
    return coordinator


# --- what is kept


async def test_a_session_that_opens_gets_the_prior_of_its_workload_key(cluster) -> None:
    first = await cluster.open(draft_release=DRAFT, traffic_class="code")
    assert not first.HasField("prior")
    await cluster.report("v1", [report(first.session_id, GOOD)])
    prior = (await cluster.open(draft_release=DRAFT, traffic_class="code")).prior
    assert (prior.first_acceptance, prior.sibling_acceptance, prior.observations) == (0.75, 0.5, 8)


async def test_what_a_lossy_rule_accepts_is_no_prior(cluster) -> None:
    first = await cluster.open(draft_release=DRAFT, traffic_class="code")
    await cluster.report("v1", [report(first.session_id, GOOD, lossy=True)])
    assert not (await cluster.open(draft_release=DRAFT, traffic_class="code")).HasField("prior")


@pytest.mark.parametrize(
    "other",
    [
        {"draft_release": "b" * 64, "traffic_class": "code"},
        {"draft_release": DRAFT, "traffic_class": "chat"},
        {"draft_release": DRAFT, "traffic_class": "code", "target": "other"},
        {"traffic_class": "code"},
    ],
)
async def test_another_draft_class_or_target_is_another_workload_key_and_no_draft_has_none(cluster, other) -> None:
    await cluster.join("v2", target=identity(name="other", weights_hash="sha256:x"))
    opened = await cluster.open(draft_release=DRAFT, traffic_class="code", target="demo")
    await cluster.report("v1", [report(opened.session_id, GOOD)])
    assert not (await cluster.open(**({"target": "demo"} | other))).HasField("prior")
    assert (await cluster.open(draft_release=DRAFT, traffic_class="code", target="demo")).HasField("prior")


async def test_no_tenants_proposals_count_for_another(start) -> None:
    keys_of = {"acme": "k" * 24, "bobs": "b" * 24}
    coordinator = await start(tenant_keys=keys_of)
    await coordinator.join("v1")
    request = pb.OpenSessionRequest(draft_release=DRAFT)

    async def opened(tenant: str) -> pb.OpenSessionResponse:
        metadata = (("authorization", f"Bearer {keys_of[tenant]}"),)
        return await coordinator.sessions.OpenSession(request, metadata=metadata)

    mine = await opened("acme")
    await coordinator.report("v1", [report(mine.session_id, bytes(64), tenant="bobs")])  # whatever the report says
    assert (await opened("acme")).HasField("prior")
    assert not (await opened("bobs")).HasField("prior")


async def test_each_observation_is_kept_once_however_often_it_is_reported(cluster, redis) -> None:
    session = (await cluster.open(draft_release=DRAFT)).session_id
    for known in (8, 8, 20, 64):
        await cluster.report("v1", [report(session, (GOOD * 8)[:known])])
    assert await kept(redis) == GOOD * 8


async def test_tokens_for_which_nothing_was_proposed_bring_no_outcome_again(cluster, redis) -> None:
    session = (await cluster.open(draft_release=DRAFT)).session_id
    await cluster.report("v1", [report(session, bytes([HIT] * 5), committed=10)])
    await cluster.report("v1", [report(session, bytes([HIT] * 5 + [MISS] * 5), committed=20)])
    assert await kept(redis) == bytes([HIT] * 5 + [MISS] * 5)


async def test_of_a_long_session_what_came_since_the_report_before_is_kept(cluster, redis) -> None:
    session = (await cluster.open(draft_release=DRAFT)).session_id
    begun, late = bytes([HIT] * 200), bytes([MISS] * 256)
    await cluster.report("v1", [report(session, begun)])
    await cluster.report("v1", [report(session, late, committed=250)])
    await cluster.report("v1", [report(session, late, committed=250)])
    assert await kept(redis) == begun + late[:50]


async def test_of_a_long_session_that_nothing_is_known_of_only_what_follows_is_kept(cluster, redis) -> None:
    session = (await cluster.open(draft_release=DRAFT)).session_id
    await cluster.report("v1", [report(session, bytes([HIT] * 256), committed=400)])
    assert await kept(redis) == b""
    await cluster.report("v1", [report(session, bytes([MISS] * 256), committed=410)])
    assert await kept(redis) == bytes([MISS] * 10)


async def test_a_resumed_session_goes_on_with_its_workload_key(cluster, redis) -> None:
    opened = await cluster.open(draft_release=DRAFT)
    await cluster.report("v1", [report(opened.session_id, GOOD)])
    resumed = await cluster.resume(opened)
    assert not resumed.HasField("prior")
    await cluster.report("v1", [report(opened.session_id, GOOD, epoch=6)])
    assert await kept(redis) == GOOD * 2


async def test_a_zombie_and_a_closed_session_add_nothing(cluster, redis) -> None:
    opened = await cluster.open(draft_release=DRAFT)
    await cluster.report("v1", [report(opened.session_id, GOOD, epoch=7)])
    await cluster.report("v1", [report(opened.session_id, GOOD * 4, epoch=6)])
    await cluster.close(opened)
    await cluster.report("v1", [report(opened.session_id, GOOD * 4, epoch=7)])
    assert await kept(redis) == GOOD


async def test_what_is_kept_is_bounded_and_expires(cluster, redis) -> None:
    for _ in range(3):
        session = (await cluster.open(draft_release=DRAFT)).session_id
        await cluster.report("v1", [report(session, GOOD * 16)])
    assert await kept(redis) == (GOOD * 64)[-verifiers.PRIOR_POSITIONS :]
    async with aioredis.from_url(redis.url) as store:
        assert 0 < await store.pttl(KEY) <= verifiers.PRIOR_MS


async def test_reports_at_once_lose_no_outcome_of_each_other(cluster, redis) -> None:
    names = [f"v{i}" for i in range(1, 9)]
    for name in names:
        await cluster.join(name, capacity=64)
    opened = [(await cluster.open(draft_release=DRAFT)).session_id for _ in names]
    sent = [cluster.report(name, [report(one, GOOD)]) for name, one in zip(names, opened, strict=True)]
    await asyncio.gather(*sent)
    assert await kept(redis) == GOOD * len(names)


async def test_a_strange_device_hardly_moves_the_usual_speed(cluster, redis) -> None:
    for draft_ms in (2.0, 2.0, 900.0, 0.0):
        session = (await cluster.open(draft_release=DRAFT)).session_id
        await cluster.report("v1", [report(session, GOOD, draft_ms=draft_ms)])
    async with aioredis.from_url(redis.url, decode_responses=True) as store:
        assert float(await store.hget(KEY, "draft_ms")) == pytest.approx(2.1)
        assert float(await store.hget(KEY, "nodes_per_level")) == 1.5


# --- what it is good for


def fresh(**changes: object) -> SessionTelemetry:
    fields = {"epoch": 5, "rtt_ms": 20.0, "committed": 3, "steps": 2, **changes}
    return SessionTelemetry(session_id="s", tenant="default", **fields)  # type: ignore[arg-type]


def decide(session: SessionTelemetry, prior: SessionTelemetry | None) -> pb.WindowDecision | None:
    return window.decide(LOAD, [session], {}, {}, LIMITS, {"s": prior} if prior else {}).get("s")


PRIOR = SessionTelemetry(acceptance_history=GOOD * 8, draft_ms=4.0, nodes_per_level=2.5)


def test_a_new_session_is_decided_about_by_its_prior() -> None:
    window = decide(fresh(), PRIOR)
    assert window is not None and window.window.k > 0
    assert window.reason.startswith("by its class's prior: ")
    assert (window.draft_ms, window.window.nodes_per_level, window.observations) == (4.0, 2.5, 64)


@pytest.mark.parametrize(
    ("session", "prior"),
    [
        (fresh(), None),
        (fresh(), SessionTelemetry(acceptance_history=GOOD * 2, draft_ms=4.0, nodes_per_level=2.5)),
        (fresh(rtt_ms=0.0), PRIOR),
    ],
)
def test_a_prior_with_few_outcomes_or_an_unknown_round_trip_decides_nothing(session, prior) -> None:
    assert decide(session, prior) is None


def test_a_sessions_own_proposals_count_beside_its_prior_and_soon_alone() -> None:
    beside = decide(fresh(acceptance_history=bytes([MISS] * 6)), PRIOR)
    alone = decide(fresh(acceptance_history=bytes([MISS] * 40)), PRIOR)
    assert beside is not None and beside.observations == 64  # the class has them, too
    assert alone is not None and alone.window.k == 0  # what contradicts them is of another text
    assert alone.observations == 40
    assert "prior" not in alone.reason
    alike = decide(fresh(acceptance_history=GOOD * 4), PRIOR)
    assert alike is not None and alike.observations == 64
