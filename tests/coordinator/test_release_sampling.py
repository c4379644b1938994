"""Test that cumulative counts become samples, over a real Redis: one of each session, whichever verifier reports it."""

from __future__ import annotations

import asyncio

import pytest
from releasing import device_of

from coordinator.config import CoordinatorConfig
from coordinator.releases import handlers as limits
from coordinator.releases.handlers import ReleaseHandlers
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

NEW, OLD = "n" * 64, "0" * 64
TRIAL = pb.ReleaseTrack(
    weights="w",
    releases=(
        pb.Release(manifest=b"2", version=2, name=NEW, state=pb.RELEASE_STATE_CANARY, share=0.25),
        pb.Release(manifest=b"1", version=1, name=OLD, state=pb.RELEASE_STATE_STABLE),
    ),
)


class Sessions:
    """Report sessions with cumulative counts, as verifiers do."""

    def __init__(self, releases: ReleaseHandlers) -> None:
        self.releases = releases

    async def report(self, positions: int, right: int, draft: str = NEW, device: str | None = None, **changes) -> None:
        """Report a session. device: by default one that was offered the draft."""
        fields = {"session_id": "s", "tenant": "acme", "epoch": 5, "traffic_class": "code"}
        fields |= {"draft_release": draft, "positions": positions, "first_accepted": right, **changes}
        device = device_of(NEW, canary=draft == NEW) if device is None else device
        await self.releases.sample("w", [SessionTelemetry(**fields)], {fields["session_id"]: device})

    async def taken(self) -> tuple[int, float, int, float]:
        """Return the number of samples and their mean acceptance, of the canary and beside it."""
        shown = (await self.releases.releases())[1][0].evidence
        return shown.canary_samples, shown.canary_acceptance, shown.stable_samples, shown.stable_acceptance


@pytest.fixture
async def sessions(redis, tmp_path):
    async def anonymous() -> bool:
        return True

    store = RedisStore(redis.url)
    trial = [("HSET", keys.RELEASES, "w", TRIAL.SerializeToString()), ("SET", keys.RELEASE_SERIAL, 1)]
    await store.call("trial", trial)
    yield Sessions(ReleaseHandlers(store, CoordinatorConfig(state_dir=tmp_path), anonymous))
    await store.close()


async def test_a_session_gives_a_sample_once_it_has_32_positions_and_no_further_one(sessions) -> None:
    await sessions.report(31, 20)
    assert (await sessions.taken())[0] == 0
    await sessions.report(40, 25)
    await sessions.report(80, 80)
    await sessions.report(40, 0, epoch=6)  # on another verifier, where counts begin again
    assert await sessions.taken() == (1, 0.625, 0, 0.0)


async def test_a_session_that_is_older_than_its_trial_gives_no_sample(sessions) -> None:
    await sessions.report(limits.MAX_POSITIONS + 1, 30)
    assert (await sessions.taken())[0] == 0


async def test_a_session_with_a_lossy_rule_gives_no_sample(sessions) -> None:
    await sessions.report(400, 390, lossy=True)
    assert (await sessions.taken())[0] == 0


async def test_samples_are_summed_up_by_side(sessions) -> None:
    await sessions.report(40, 25)
    await sessions.report(40, 10, OLD, session_id="t", tenant="bobs")
    await sessions.report(40, 30, OLD, session_id="u", tenant="bobs")
    assert await sessions.taken() == (1, 0.625, 2, 0.5)


async def test_a_session_of_the_canary_counts_from_when_it_has_swapped_its_draft(sessions) -> None:
    device = device_of(NEW, canary=True)
    await sessions.report(40, 10, OLD, device)
    await sessions.report(10, 9, NEW, device)
    assert (await sessions.taken())[0] == 0
    await sessions.report(50, 45, NEW, device)
    assert await sessions.taken() == (1, 0.9, 0, 0.0)


async def test_samples_of_one_side_wait_for_those_of_the_other(sessions) -> None:
    for i in range(20):
        await sessions.report(40, 20, OLD, session_id=f"s{i}")
    assert (await sessions.taken())[2] == limits.IN_STEP
    await sessions.report(40, 20, session_id="canary")
    for i in range(20, 40):
        await sessions.report(40, 20, OLD, session_id=f"s{i}")
    assert (await sessions.taken())[::2] == (1, 2 * limits.IN_STEP)


async def test_a_trial_has_room_for_so_many_tenants_and_the_first_ones_stay(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "TENANTS", 2)
    for i, (name, taken) in enumerate((("a", 1), ("b", 2), ("made-up", 2), ("a", 3), ("b", 4))):
        await sessions.report(40, 20, session_id=f"s{i}", tenant=name)
        assert (await sessions.taken())[0] == taken


@pytest.mark.parametrize(("draft", "offered"), [(NEW, False), (OLD, True)])
async def test_a_session_that_drafts_with_what_its_device_was_not_offered_does_not_count(
    sessions, draft: str, offered: bool
) -> None:
    await sessions.report(40, 25, draft, device_of(NEW, canary=offered))
    assert await sessions.taken() == (0, 0.0, 0, 0.0)


async def test_a_session_that_was_not_placed_here_does_not_count(sessions) -> None:
    one = SessionTelemetry(session_id="s", epoch=5, tenant="acme", draft_release=OLD, positions=40, first_accepted=20)
    await sessions.releases.sample("w", [one], {})
    assert (await sessions.taken())[2] == 0


async def test_reports_that_come_together_lose_nothing_and_count_nothing_twice(sessions, monkeypatch) -> None:
    monkeypatch.setattr(limits, "IN_STEP", 50)
    await asyncio.gather(*(sessions.report(40, 20, session_id=f"s{i}") for i in range(50) for _ in range(3)))
    assert (await sessions.taken())[0] == 50
