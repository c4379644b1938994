"""Test `outrider releases` against a real coordinator: its output is readable, and its refusals name a remedy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from releasing import SIGNER, name_of, publish, signed, states, steer

from coordinator import cli
from coordinator.cli import local
from coordinator.cli import releases as releases_cli
from outrider.wire import manifest as manifests
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

CANARY, STABLE = pb.RELEASE_STATE_CANARY, pb.RELEASE_STATE_STABLE
SUPERSEDED, ROLLED_BACK = pb.RELEASE_STATE_SUPERSEDED, pb.RELEASE_STATE_ROLLED_BACK


@pytest.fixture
def outrider(coordinator, capsys):
    """Run `outrider releases ...`; return the exit code, stdout and stderr."""

    async def run(*arguments: object) -> tuple[int, str, str]:
        words = ["releases", *map(str, arguments), "--coordinator", coordinator.address]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(cli.main, words)
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def key_file(path: Path, pem: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(pem)
    return path


@pytest.fixture
def key(tmp_path):
    return key_file(tmp_path / "publisher.pem", SIGNER.pem())


async def test_without_releases_the_list_says_what_devices_do(outrider) -> None:
    code, out, _ = await outrider("list")
    assert (code, out) == (0, "no releases: devices draft with what their verifiers offer\n")


async def test_a_manifest_is_published_listed_and_shown(outrider, tmp_path) -> None:
    path = tmp_path / "release.manifest"
    path.write_bytes(signed(1, metrics={"tokens_per_step.code": 4.25}, parent="sha256:" + "d" * 64, size=2_012_128))
    code, out, _ = await outrider("publish", path)
    assert code == 0
    _, row = out.splitlines()
    assert row.split()[:5] == [name_of(1)[:12], "1", "w", "canary", "25%"]
    assert (await outrider("list"))[1] == out
    code, out, _ = await outrider("show", name_of(1)[:8])
    assert code == 0
    for part in (name_of(1), "canary 25%, since 20", "d" * 64, SIGNER.key_id, "2.0 MB, Q8_0", "tokens_per_step.code"):
        assert part in out
    assert "4.25" in out
    assert "0 samples" in out


async def test_releases_are_promoted_pinned_and_rolled_back(outrider, coordinator) -> None:
    await publish(coordinator, signed(1))
    assert "stable" in (await outrider("promote", name_of(1)[:12]))[1]
    await publish(coordinator, signed(2))
    assert "canary 25%, pinned" in (await outrider("pin", name_of(2)[:12]))[1]
    assert "pinned" not in (await outrider("unpin", name_of(2)[:12]))[1]
    assert "rolled back" in (await outrider("rollback", name_of(2)[:12]))[1]
    assert await states(coordinator) == {1: STABLE, 2: ROLLED_BACK}


async def test_a_canary_shows_how_many_tenants_decide_and_what_it_waits_for(outrider, coordinator) -> None:
    await publish(coordinator, signed(1))
    _, out, _ = await outrider("show", name_of(1)[:12])
    assert "0 take part, and a decision needs 1" in out
    assert "samples of 1 more tenant, or for you: `outrider releases promote" in out
    for name in ("acme", "bobs"):
        await coordinator.admin.CreateTenant(pb.CreateTenantRequest(name=name))
    _, out, _ = await outrider("show", name_of(1)[:12])
    assert "0 take part, and a decision needs 3" in out
    assert f"samples of 3 more tenants, or for you: `outrider releases promote {name_of(1)[:12]}`, or rollback" in out
    await outrider("pin", name_of(1)[:12])
    assert "its unpinning" in (await outrider("show", name_of(1)[:12]))[1]
    await outrider("promote", name_of(1)[:12])
    assert "waits for" not in (await outrider("show", name_of(1)[:12]))[1]


async def two_stable(coordinator) -> None:
    for version in (1, 2):
        await publish(coordinator, signed(version))
        await steer(coordinator, version, pb.RELEASE_ACTION_PROMOTE)


async def test_rolling_back_a_stable_release_is_a_new_release_of_the_one_before(outrider, coordinator, key) -> None:
    await two_stable(coordinator)
    code, out, err = await outrider("rollback", name_of(2)[:12])
    assert (code, out) == (2, "")
    assert "signed as version 3" in err
    assert "--key FILE" in err
    code, out, _ = await outrider("rollback", name_of(2)[:12], "--key", key)
    assert code == 0
    assert out.splitlines()[1].split()[:4] == [name_of(1)[:12], "3", "w", "stable"]
    assert await states(coordinator) == {1: SUPERSEDED, 2: SUPERSEDED, 3: STABLE}


async def test_where_another_release_is_on_trial_going_back_says_what_to_do(outrider, coordinator, key) -> None:
    await two_stable(coordinator)
    await publish(coordinator, signed(3))
    code, _, err = await outrider("rollback", name_of(2)[:12], "--key", key)
    assert code == 0
    assert "another release is on trial: roll it back" in err
    assert (await states(coordinator))[3] == CANARY


async def test_where_nothing_was_stable_before_there_is_nothing_to_go_back_to(outrider, coordinator, key) -> None:
    await publish(coordinator, signed(1))
    await steer(coordinator, 1, pb.RELEASE_ACTION_PROMOTE)
    code, _, err = await outrider("rollback", name_of(1)[:12], "--key", key)
    assert code == 2
    assert "no release was stable before version 1" in err
    assert "publish another draft as version 2" in err


async def test_going_back_twice_does_not_come_back_to_the_bad_draft(outrider, coordinator, key) -> None:
    for version in (1, 2, 3):
        await publish(coordinator, signed(version))
        await steer(coordinator, version, pb.RELEASE_ACTION_PROMOTE)
    assert (await outrider("rollback", name_of(3)[:12], "--key", key))[1].splitlines()[1].split()[0] == name_of(2)[:12]
    assert (await outrider("rollback", name_of(2)[:12], "--key", key))[1].splitlines()[1].split()[0] == name_of(1)[:12]
    code, out, err = await outrider("rollback", name_of(1)[:12], "--key", key)
    assert (code, out) == (2, "")
    assert "publish another draft as version 6" in err
    assert (await states(coordinator))[5] == STABLE


async def test_going_back_from_a_pinned_release_says_that_it_is_pinned_and_publishes_nothing(
    outrider, coordinator, key
) -> None:
    await two_stable(coordinator)
    await steer(coordinator, 2, pb.RELEASE_ACTION_PIN)
    code, out, err = await outrider("rollback", name_of(2)[:12], "--key", key)
    assert (code, out) == (2, "")
    assert f"outrider releases unpin {name_of(2)[:12]}" in err
    assert await states(coordinator) == {1: SUPERSEDED, 2: STABLE}


async def test_going_back_with_another_key_than_devices_know_is_refused(outrider, coordinator, tmp_path) -> None:
    await two_stable(coordinator)
    other = key_file(tmp_path / "other.pem", Signer.generate().pem())
    code, out, err = await outrider("rollback", name_of(2)[:12], "--key", other)
    assert (code, out) == (2, "")
    assert f"signed with {SIGNER.key_id}" in err
    assert await states(coordinator) == {1: SUPERSEDED, 2: STABLE}


async def test_what_is_wrong_is_reported_in_one_line(outrider, coordinator, tmp_path, key) -> None:
    await publish(coordinator, signed(2))
    old, junk = tmp_path / "old", tmp_path / "junk"
    old.write_bytes(signed(1, Signer.generate()))
    key_file(junk, b"junk")
    shared = key_file(tmp_path / "shared.pem", SIGNER.pem())
    shared.chmod(0o640)
    for arguments, complaint in (
        (("publish", old), "not above 2"),
        (("publish", junk), "manifest"),
        (("publish", tmp_path / "absent"), "cannot be read"),
        (("show", "abcdef"), "no release 'abcdef'"),
        (("promote", "Z"), "hex digits"),
        (("rollback", name_of(2)[:12], "--key", junk), "PEM"),
        (("rollback", name_of(2)[:12], "--key", shared), "chmod 600"),
    ):
        code, out, err = await outrider(*arguments)
        assert code == (3 if arguments[0] == "show" else 2)
        assert out == ""
        [line] = err.splitlines()
        assert line.startswith("outrider: ")
        assert complaint in line


def test_the_draft_before_is_signed_with_all_that_it_was() -> None:
    before = signed(1, metrics={"m": 1.0}, quantization="Q4_K_M")
    known = [pb.Release(manifest=signed(2), state=STABLE), pb.Release(manifest=before, state=SUPERSEDED)]
    assert releases_cli._stable_before(known[0], known) == manifests.read_unverified(before)
    assert releases_cli._next_version("sha256:w", known) == 3


async def test_help_names_every_verb(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["releases", "--help"])
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("list", "show", "promote", "rollback", "pin", "unpin", "publish"))


def test_up_serves_drafts_from_its_state_directory_unless_the_environment_says_where(monkeypatch) -> None:
    for name in ("ARTIFACTS", "HTTP", "STATE_DIR"):
        monkeypatch.delenv(f"OUTRIDER_COORDINATOR_{name}", raising=False)
    assert local._served_drafts("/state") == ["--artifacts", "/state/artifacts", "--http", "127.0.0.1:0"]
    monkeypatch.setenv("OUTRIDER_COORDINATOR_STATE_DIR", "/other")
    assert local._served_drafts(None)[1] == "/other/artifacts"
    monkeypatch.setenv("OUTRIDER_COORDINATOR_HTTP", "127.0.0.1:9")
    assert local._served_drafts("/state") == []
