"""Test that a session is recorded as its tenant allows; this is drawn once, and its tickets say so."""

from __future__ import annotations

import pytest

from coordinator.api.authentication import Authenticator, RecordingPolicy
from coordinator.config import CoordinatorConfig
from outrider.core.errors import BadRequest
from outrider.wire.v1 import coordinator_pb2 as pb

ACME, GLOBEX = "acme-key-0123456789", "globex-key-0123456789"
DAY_S = 86_400.0
KEYS = f'[tenants]\nacme = "{ACME}"\nglobex = "{GLOBEX}"\n'


async def open_as(coordinator, key: str = "", **request):
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    return await coordinator.sessions.OpenSession(pb.OpenSessionRequest(**request), metadata=metadata)


async def test_nothing_is_recorded_where_nobody_said_so(coordinator) -> None:
    await coordinator.join("v1", capacity=50)
    for _ in range(20):
        assert coordinator.read((await coordinator.open()).primary).keep_s == 0.0


async def test_a_tenant_is_recorded_as_it_lets_and_the_others_are_not(start, tmp_path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(KEYS + "[recording.acme]\nshare = 1.0\nkeep_days = 30\n")
    coordinator = await start(tenants_file=path)
    await coordinator.join("v1", capacity=50)
    assert coordinator.read((await open_as(coordinator, ACME)).primary).keep_s == 30 * DAY_S
    assert coordinator.read((await open_as(coordinator, GLOBEX)).primary).keep_s == 0.0


async def test_prompts_are_recorded_only_where_that_was_said_too(start, tmp_path) -> None:
    path = tmp_path / "tenants.toml"
    both = (
        "[recording.acme]\nshare = 1\nkeep_days = 30\nprompts = true\n[recording.globex]\nshare = 1\nkeep_days = 30\n"
    )
    path.write_text(KEYS + both)
    coordinator = await start(tenants_file=path)
    await coordinator.join("v1", capacity=50)
    asked = [coordinator.read((await open_as(coordinator, key)).primary) for key in (ACME, GLOBEX)]
    assert [claims.keep_s for claims in asked] == [30 * DAY_S] * 2
    assert [claims.keep_prompts for claims in asked] == [True, False]


async def test_without_tenants_the_draw_is_made_once_and_holds_at_every_verifier(start, tmp_path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[recording.default]\nshare = 0.5\nkeep_days = 30\n")
    coordinator = await start(tenants_file=path)
    await coordinator.join("v1", capacity=100)
    await coordinator.join("v2", capacity=100)
    drawn = []
    for _ in range(40):
        opened = await coordinator.open()
        claims = [coordinator.read(grant).keep_s for grant in (opened.primary, opened.standby)]
        resumed = await coordinator.resume(opened)
        claims += [coordinator.read(grant).keep_s for grant in (resumed.primary, resumed.standby)]
        assert len(set(claims)) == 1
        drawn.append(claims[0] > 0)
    assert 8 <= sum(drawn) <= 32


async def test_tickets_say_what_the_device_drafts_with_and_what_it_asks(coordinator, redis) -> None:
    await coordinator.join("v1")
    opened = await coordinator.open(draft_release="a" * 64, traffic_class="code")
    redis.stop()
    redis.start()
    await coordinator.join("v1")
    for grant in (opened.primary, (await coordinator.resume(opened)).primary):
        claims = coordinator.read(grant)
        assert (claims.draft_release, claims.traffic_class) == ("a" * 64, "code")


def test_a_share_of_the_sessions_is_drawn_and_the_same_ones_each_time() -> None:
    policy = RecordingPolicy(share=0.2, keep_days=10.0)
    drawn = [policy.keep_s_of(f"session-{i}") for i in range(5_000)]
    assert set(drawn) == {0.0, 10 * DAY_S}
    assert abs(drawn.count(10 * DAY_S) / 5_000 - 0.2) < 0.02
    assert drawn == [policy.keep_s_of(f"session-{i}") for i in range(5_000)]
    for share, kept in ((0.0, 0.0), (1.0, 10 * DAY_S)):
        policy = RecordingPolicy(share=share, keep_days=10.0)
        assert {policy.keep_s_of(f"s{i}") for i in range(100)} == {kept}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[recording.initech]\nshare = 1\nkeep_days = 1", "for a tenant that has no key"),
        ("[recording.acme]\nshare = 1", "recording.acme.keep_days: Field required"),
        ("[recording.acme]\nshare = 1\nkeep_days = 1\nmore = 2", "recording.acme.more: Extra"),
        ("[recording.acme]\nshare = 1.5\nkeep_days = 1", "recording.acme.share: .* less than or equal to 1"),
        ("[recording.acme]\nshare = true\nkeep_days = 1", "recording.acme.share: .* number"),
        ("[recording.acme]\nshare = nan\nkeep_days = 1", "recording.acme.share: .* finite"),
        ('[recording.acme]\nshare = 1\nkeep_days = "long"', "recording.acme.keep_days: .* number"),
        ("[recording.acme]\nshare = 1\nkeep_days = 0", "recording.acme.keep_days: .* greater"),
        ("[recording.acme]\nshare = 1\nkeep_days = 1\nprompts = 1", "recording.acme.prompts: .* boolean"),
        ("[recording]\nacme = 1", r"tables \[recording.NAME\]"),
    ],
)
def test_a_senseless_policy_is_refused_with_the_reason(tmp_path, text, complaint) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f"{KEYS}{text}\n")
    with pytest.raises(BadRequest, match=complaint):
        Authenticator(CoordinatorConfig(tenants_file=path))


def test_without_tenants_no_other_than_the_one_of_all_callers_is_recorded(tmp_path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[recording.acme]\nshare = 1\nkeep_days = 1\n")
    with pytest.raises(BadRequest, match=r"has no key.*without keys is default"):
        Authenticator(CoordinatorConfig(tenants_file=path))
