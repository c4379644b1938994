"""Test that cumulative counts become samples, over a real Redis: each span once, whichever verifier reports it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from releasing import device_of

from coordinator.releases import store as limits
from coordinator.releases.records import CanaryTrial
from coordinator.releases.store import ReleaseStore
from coordinator.store import keys
from coordinator.store.redis_store import SESSIONS_AT_ONCE, RedisStore
from outrider.core.telemetry import SessionTelemetry

NEW, OLD = "n" * 64, "0" * 64
TRIAL = CanaryTrial(NEW, 2, OLD, share=0.25)


@pytest.fixture
async def releases(redis):
    store = RedisStore(redis.url)
    yield ReleaseStore(store)
    await store.close()


class Sessions:
    """Report sessions with cumulative counts, as verifiers do."""

    def __init__(self, releases: ReleaseStore, trial: CanaryTrial = TRIAL, per_session: int = 4) -> None:
        self.releases = releases
        self.trial = trial
        self.per_session = per_session

    async def report(
        self, positions: int, right: int, draft: str = NEW, device: str | None = None, **changes: object
    ) -> int:
        """Report a session. device_ids: by default one that was offered the draft."""
        fields = {"session_id": "s", "tenant": "acme", "epoch": 5, "traffic_class": "code"}
        fields |= {"draft_release": draft, "positions": positions, "first_accepted": right, **changes}
        one, name = SessionTelemetry(**fields), self.trial.name
        device = device_of(name, canary=draft == name) if device is None else device
        return await self.releases.sample("w", self.trial, [one], {one.session_id: device}, self.per_session)

    async def taken(self) -> list[tuple[bool, int, int]]:
        found = await self.releases.samples("w", self.trial.version)
        return [(sample.canary, sample.accepted, sample.positions) for sample in found or ()]


@pytest.fixture
def sessions(releases) -> Sessions:
    return Sessions(releases)


async def test_a_span_of_32_positions_is_a_sample_and_a_shorter_one_goes_on(sessions) -> None:
    assert await sessions.report(20, 15) == 0
    assert await sessions.report(31, 20) == 0
    assert await sessions.report(40, 25) == 1
    assert await sessions.report(60, 40) == 0
    assert await sessions.report(75, 50) == 1
    assert await sessions.taken() == [(True, 25, 40), (True, 25, 35)]


async def test_a_session_with_a_lossy_rule_gives_no_sample(sessions) -> None:
    assert await sessions.report(400, 390, lossy=True) == 0
    assert await sessions.taken() == []


async def test_the_same_report_again_adds_nothing(sessions) -> None:
    assert [await sessions.report(40, 25) for _ in range(3)] == [1, 0, 0]


async def test_samples_say_whose_they_are_and_of_what_class(sessions, releases) -> None:
    await sessions.report(40, 25)
    await sessions.report(40, 10, OLD, session_id="t", tenant="bobs", traffic_class="")
    canary, stable = await releases.samples("w", 2)
    assert (canary.canary, canary.tenant, canary.traffic, canary.acceptance) == (True, "acme", "code", 25 / 40)
    assert (stable.canary, stable.tenant, stable.traffic, stable.acceptance) == (False, "bobs", "", 10 / 40)


async def test_sessions_with_other_drafts_or_with_none_are_not_compared(sessions) -> None:
    assert await sessions.report(40, 25, "f" * 64) == 0
    assert await sessions.report(40, 25, "") == 0
    first = Sessions(sessions.releases, CanaryTrial(NEW, 1, "", share=0.25))
    assert await first.report(40, 25, "f" * 64, session_id="u") == 1  # nothing is stable yet: any other draft stands
    assert await first.report(40, 25, "", session_id="x") == 0
    assert await first.taken() == [(False, 25, 40)]


async def test_what_a_session_did_long_before_the_trial_does_not_count(sessions) -> None:
    assert await sessions.report(5_000, 4_000, OLD) == 0
    assert await sessions.report(5_040, 4_010, OLD) == 1
    assert await sessions.taken() == [(False, 10, 40)]


async def test_counts_that_begin_again_on_another_verifier_begin_another_span(sessions) -> None:
    await sessions.report(20, 20)
    assert await sessions.report(10, 2, epoch=6) == 0
    assert await sessions.report(40, 12, epoch=6) == 1
    assert await sessions.taken() == [(True, 12, 40)]


async def test_a_verifier_that_lost_the_session_is_not_counted_any_more(sessions) -> None:
    await sessions.report(40, 12, epoch=6)
    assert await sessions.report(400, 400, epoch=5) == 0
    assert await sessions.report(80, 24, epoch=6) == 1


async def test_a_session_of_the_canary_counts_from_when_it_has_swapped_its_draft(sessions) -> None:
    device = device_of(NEW, canary=True)
    await sessions.report(40, 10, OLD, device)
    await sessions.report(60, 15, OLD, device)
    assert await sessions.report(10, 9, NEW, device) == 0
    assert await sessions.report(50, 45, NEW, device) == 1
    assert await sessions.taken() == [(True, 45, 50)]


async def test_a_session_gives_no_more_than_its_few_samples_however_often_it_swaps(sessions) -> None:
    for i in range(1, 40):
        await sessions.report(40 * i, 40 * i, session_id="long")
    assert len(await sessions.taken()) == 4
    for i in range(1, 40):
        await sessions.report(0, 0, OLD, session_id="flips", epoch=5 + i)
        await sessions.report(40, 40, NEW, session_id="flips", epoch=5 + i)
    assert len(await sessions.taken()) == 8


async def test_a_tenant_has_at_most_half_of_the_room_that_others_leave(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "ARM_SAMPLES", 64)
    for tenant, room in (("mallory", 32), ("mallets", 16), ("acme", 8), ("bobs", 4)):
        for i in range(40):
            await sessions.report(40, 20, session_id=f"{tenant}-{i}", tenant=tenant)
        found = await sessions.releases.samples("w", TRIAL.version)
        assert sum(sample.tenant == tenant for sample in found) == room


async def test_tenants_that_come_alike_have_alike(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "ARM_SAMPLES", 40)
    for i in range(40):
        for tenant in ("a", "b", "c"):
            await sessions.report(40, 20, session_id=f"{tenant}-{i}", tenant=tenant)
    found = await sessions.releases.samples("w", TRIAL.version)
    assert Counter(sample.tenant for sample in found) == {"a": 10, "b": 10, "c": 10}


async def test_a_trial_has_room_for_so_many_tenants_and_the_first_ones_stay(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "TENANTS", 2)
    for name, taken in (("a", 1), ("b", 1), ("made-up", 0), ("a", 1), ("b", 1)):
        session_id = f"{name}-{len(await sessions.taken())}"
        assert await sessions.report(40, 20, session_id=session_id, tenant=name) == taken


async def test_where_one_side_is_full_the_other_gets_no_more_either(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "ARM_SAMPLES", 4)
    for i in range(2):
        assert await sessions.report(40, 20, OLD, session_id=f"a{i}", tenant="acme") == 1
    assert await sessions.report(40, 20, session_id="a-canary", tenant="acme") == 0
    assert await sessions.report(40, 20, session_id="b-canary", tenant="bobs") == 1


@pytest.mark.parametrize(("draft", "offered"), [(NEW, False), (OLD, True)])
async def test_a_session_that_drafts_with_what_its_device_was_not_offered_does_not_count(
    sessions, draft: str, offered: bool
) -> None:
    device = device_of(NEW, canary=offered)
    assert await sessions.report(40, 25, draft, device) == 0
    assert await sessions.taken() == []


async def test_a_device_without_an_id_is_offered_no_canary_and_counts_beside_it(sessions) -> None:
    assert await sessions.report(40, 25, NEW, "") == 0
    assert await sessions.report(40, 25, OLD, "", session_id="t") == 1
    assert await sessions.taken() == [(False, 25, 40)]


async def test_a_session_that_was_not_placed_here_does_not_count(releases) -> None:
    one = SessionTelemetry("s", 5, "acme", draft_release=NEW, positions=40, first_accepted=20)
    assert await releases.sample("w", TRIAL, [one], {}, 4) == 0


async def test_samples_say_when_they_came_and_what_cannot_be_read_is_left_out(sessions, releases, redis) -> None:
    await sessions.report(40, 25)
    store = RedisStore(redis.url)
    await store._redis.rpush(keys.samples("w", 2), "c:a:b::1:2:3", "c:acme:code:25:40")
    await store.close()
    await sessions.report(40, 10, OLD, session_id="t")
    first, second = await releases.samples("w", 2)
    assert abs(first.at_s - time.time()) < 60.0
    assert 0.0 <= second.at_s - first.at_s < 10.0


@pytest.mark.parametrize(("positions", "right"), [(80, 60), (100_000, 50_000)], ids=["too many right", "too quick"])
async def test_counts_that_cannot_be_are_no_sample_and_what_follows_counts_again(sessions, positions, right) -> None:
    await sessions.report(40, 5)
    assert await sessions.report(positions, right) == 0
    assert await sessions.report(positions + 40, right + 30) == 1
    assert await sessions.taken() == [(True, 5, 40), (True, 30, 40)]


async def test_another_trial_begins_without_the_samples_of_the_last_one(sessions) -> None:
    await sessions.report(40, 20)
    third = Sessions(sessions.releases, CanaryTrial("3" * 64, 3, NEW, share=0.25))
    assert await third.taken() == []
    assert await third.report(60, 30) == 1  # its session is young, and is all of this time
    assert await third.report(400, 330, session_id="old") == 0


async def test_reports_that_come_together_lose_nothing_and_count_nothing_twice(sessions) -> None:
    ids = [f"s{i}" for i in range(50)]
    added = await asyncio.gather(*(sessions.report(40, 20, session_id=i) for i in ids for _ in range(3)))
    assert sum(added) == 50
    assert len(await sessions.taken()) == 50


async def test_a_report_of_many_sessions_is_taken_in_lots(sessions, releases, monkeypatch) -> None:
    lots = []
    run = RedisStore.run

    async def counted(self, script, touched, arguments):
        lots.append(len(touched) - 2)
        return await run(self, script, touched, arguments)

    monkeypatch.setattr(RedisStore, "run", counted)
    many = [
        SessionTelemetry(f"s{i}", 5, "acme", draft_release=NEW, positions=40, first_accepted=20) for i in range(600)
    ]
    devices = {one.session_id: device_of(NEW, canary=True) for one in many}
    assert await releases.sample("w", TRIAL, many, devices, 4) == 600
    assert sum(lots) == 600
    assert max(lots) == SESSIONS_AT_ONCE


async def test_samples_that_are_known_are_not_sent_again(sessions, releases) -> None:
    await sessions.report(40, 20)
    assert await releases.samples("w", 2, known=1) is None
    await sessions.report(40, 20, session_id="t")
    assert len(await releases.samples("w", 2, known=1)) == 2
