"""Test that cumulative counts become samples, over a real Redis: each span once, whichever verifier reports it."""

from __future__ import annotations

import asyncio

import pytest
from releasing import device_of

from coordinator.releases import store as limits
from coordinator.releases.evidence import Arm, Arms
from coordinator.releases.records import LifecycleState, Release, ReleaseTrack
from coordinator.releases.store import ReleaseStore
from coordinator.store.redis_store import RedisStore
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

NEW, OLD = "n" * 64, "0" * 64
TRIAL = ReleaseTrack(
    "w",
    releases=(
        Release(b"2", 2, NEW, LifecycleState.CANARY, 0.0, share=0.25),
        Release(b"1", 1, OLD, LifecycleState.STABLE, 0.0),
    ),
)


@pytest.fixture
async def releases(redis):
    store = RedisStore(redis.url)
    yield ReleaseStore(store)
    await store.close()


class Sessions:
    """Report sessions with cumulative counts, as verifiers do."""

    def __init__(self, releases: ReleaseStore, trial: ReleaseTrack = TRIAL) -> None:
        self.releases = releases
        self.trial = trial

    async def report(
        self, positions: int, right: int, draft: str = NEW, device: str | None = None, **changes: object
    ) -> int:
        """Report a session. device_ids: by default one that was offered the draft."""
        fields = {"session_id": "s", "tenant": "acme", "epoch": 5, "traffic_class": "code"}
        fields |= {"draft_release": draft, "positions": positions, "first_accepted": right, **changes}
        one, name = SessionTelemetry(**fields), NEW
        device = device_of(name, canary=draft == name) if device is None else device
        return await self.releases.sample(self.trial, [one], {one.session_id: device})

    async def taken(self, tenant: str = "acme") -> tuple[int, float, int, float]:
        """Return the number of samples and the sum of their acceptances, of the canary and beside it."""
        found = (await self.releases.samples("w", 2)).get(tenant, Arms())
        return found.canary.samples, found.canary.total, found.stable.samples, found.stable.total


@pytest.fixture
def sessions(releases) -> Sessions:
    return Sessions(releases)


async def test_a_span_of_32_positions_is_a_sample_and_a_shorter_one_goes_on(sessions) -> None:
    assert await sessions.report(20, 15) == 0
    assert await sessions.report(31, 20) == 0
    assert await sessions.report(40, 25) == 1
    assert await sessions.taken() == (1, 0.625, 0, 0.0)


async def test_a_session_with_a_lossy_rule_gives_no_sample(sessions) -> None:
    assert await sessions.report(400, 390, lossy=True) == 0


async def test_samples_are_summed_up_by_tenant_and_side(sessions, releases) -> None:
    await sessions.report(40, 25)
    await sessions.report(40, 10, OLD, session_id="t", tenant="bobs")
    await sessions.report(40, 30, OLD, session_id="u", tenant="bobs")
    assert await releases.samples("w", 2) == {
        "acme": Arms(Arm(1, 0.625, 0.390625), Arm()),
        "bobs": Arms(Arm(), Arm(2, 1.0, 0.625)),
    }


async def test_counts_that_begin_again_on_another_verifier_begin_another_span(sessions) -> None:
    await sessions.report(20, 20)
    assert await sessions.report(10, 2, epoch=6) == 0
    assert await sessions.report(40, 12, epoch=6) == 1
    assert await sessions.taken() == (1, 0.3, 0, 0.0)


async def test_a_session_of_the_canary_counts_from_when_it_has_swapped_its_draft(sessions) -> None:
    device = device_of(NEW, canary=True)
    await sessions.report(40, 10, OLD, device)
    assert await sessions.report(10, 9, NEW, device) == 0
    assert await sessions.report(50, 45, NEW, device) == 1
    assert await sessions.taken() == (1, 0.9, 0, 0.0)


async def test_samples_of_one_side_wait_for_those_of_the_other(sessions) -> None:
    for i in range(20):
        await sessions.report(40, 20, OLD, session_id=f"s{i}")
    assert (await sessions.taken())[2] == limits.IN_STEP
    assert await sessions.report(40, 20, session_id="canary") == 1
    for i in range(20, 40):
        await sessions.report(40, 20, OLD, session_id=f"s{i}")
    assert (await sessions.taken())[2] == 2 * limits.IN_STEP


async def test_a_trial_has_room_for_so_many_tenants_and_the_first_ones_stay(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "TENANTS", 2)
    for i, (name, taken) in enumerate((("a", 1), ("b", 1), ("made-up", 0), ("a", 1), ("b", 1))):
        assert await sessions.report(40, 20, session_id=f"s{i}", tenant=name) == taken


@pytest.mark.parametrize(("draft", "offered"), [(NEW, False), (OLD, True)])
async def test_a_session_that_drafts_with_what_its_device_was_not_offered_does_not_count(
    sessions, draft: str, offered: bool
) -> None:
    device = device_of(NEW, canary=offered)
    assert await sessions.report(40, 25, draft, device) == 0


async def test_a_session_that_was_not_placed_here_does_not_count(releases) -> None:
    one = SessionTelemetry(session_id="s", epoch=5, tenant="acme", draft_release=NEW, positions=40, first_accepted=20)
    assert await releases.sample(TRIAL, [one], {}) == 0


@pytest.mark.parametrize(("positions", "right"), [(40, 50), (100_000, 50_000)], ids=["too many right", "too quick"])
async def test_counts_that_cannot_be_are_no_sample_and_what_follows_counts_again(sessions, positions, right) -> None:
    await sessions.report(20, 5)
    assert await sessions.report(positions, right) == 0
    assert await sessions.report(positions + 40, right + 30) == 1
    assert await sessions.taken() == (1, 0.75, 0, 0.0)


async def test_reports_that_come_together_lose_nothing_and_count_nothing_twice(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "IN_STEP", 50)
    ids = [f"s{i}" for i in range(50)]
    added = await asyncio.gather(*(sessions.report(40, 20, session_id=i) for i in ids for _ in range(3)))
    assert sum(added) == 50
    assert (await sessions.taken())[0] == 50
