"""Test `outrider releases` against a real coordinator: its output is readable, and its refusals name a remedy."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
from releasing import SIGNER, name_of, publish, signed, states, steer

from coordinator import cli
from coordinator.cli import releases
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


async def two_stable(coordinator) -> None:
    for version in (1, 2):
        await publish(coordinator, signed(version))
        await steer(coordinator, version, pb.RELEASE_ACTION_PROMOTE)


async def test_where_another_release_is_on_trial_going_back_says_what_to_do(outrider, coordinator, key) -> None:
    await two_stable(coordinator)
    await publish(coordinator, signed(3))
    code, _, err = await outrider("rollback", name_of(2)[:12], "--key", key)
    assert code == 0
    assert "another release is on trial: roll it back" in err
    assert (await states(coordinator))[3] == CANARY


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


async def test_a_state_that_only_a_newer_coordinator_knows_is_shown_as_unknown() -> None:
    async def call(*_: object) -> pb.ListReleasesResponse:
        return pb.ListReleasesResponse(releases=[pb.Release(manifest=signed(1), state=99)])

    shown = await releases.list_releases(argparse.Namespace(limit=10), call)
    assert shown.document["releases"][0]["state"] == "unknown"
