"""Test a device's stored release state: wherever the device is killed, it returns to a good draft."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.releases.state import InstalledRelease, ReleaseFolder, ReleaseState

TARGET = "sha256:" + "a" * 64


def digest(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def installed(version: int, *, canary: bool = False) -> InstalledRelease:
    return InstalledRelease(
        digest=digest(version), version=version, canary=canary, manifest=digest(("manifest", version))
    )


def taken(*releases: InstalledRelease) -> ReleaseState:
    """Return the state after these releases were taken, one after another."""
    state = ReleaseState()
    for release in releases:
        state = state.take(release)
    return state


def test_a_stable_release_raises_the_floor_and_a_canary_does_once_it_is_everybodys() -> None:
    state = taken(installed(1), installed(2, canary=True))
    assert state.floor == 1 and state.take(installed(2)).floor == 2


def test_canaries_one_after_another_keep_the_stable_release_to_come_back_to() -> None:
    state = taken(installed(1), installed(2, canary=True), installed(3, canary=True))
    assert state.last_good == installed(1) and state.dropped().current == installed(1)
    back = state.take(installed(1))
    assert back.current == installed(1) and back.last_good is None


@given(st.lists(st.tuples(st.sampled_from(["take", "canary", "drop"]), st.integers(1, 6)), max_size=20))
def test_what_is_come_back_to_was_stable_and_the_floor_never_falls(steps: list[tuple[str, int]]) -> None:
    state, stable = ReleaseState(), set[str]()
    for does, version in steps:
        offered, before = installed(version, canary=does == "canary"), state.floor
        if does == "drop":
            state = state.dropped()
        elif version >= state.floor:
            state = state.take(offered)
            stable |= set() if offered.canary else {offered.digest}
        assert state.floor >= before
        held = [one for one in (state.current, state.last_good) if one is not None]
        assert len({one.digest for one in held}) == len(held)
        assert state.last_good is None or state.last_good.digest in stable


# --- on disk


def test_a_folder_gives_what_was_written_there_last(tmp_path: Path) -> None:
    folder, other = ReleaseFolder(tmp_path, TARGET), ReleaseFolder(tmp_path, TARGET)
    folder.change(taken(installed(1)))
    other.read()
    assert other.state == folder.state == ReleaseFolder(tmp_path, TARGET).state


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": 2, "device_id": "../../etc"}',
        b'{"format": 2, "current": {"digest": "x", "version": 1, "canary": false, "manifest": "y"}}',
    ],
)
def test_a_state_that_makes_no_sense_is_kept_and_nothing_is_taken_until_it_is_mended(
    tmp_path: Path, damaged: bytes
) -> None:
    file = ReleaseFolder(tmp_path, TARGET).path / "state.json"
    file.write_bytes(damaged)
    with pytest.raises(OSError, match=r"state\.json is damaged .* too old to be taken; restore it, or remove it"):
        ReleaseFolder(tmp_path, TARGET)
    assert file.read_bytes() == damaged
    file.unlink()
    assert ReleaseFolder(tmp_path, TARGET).state.floor == 0


def test_files_that_the_state_does_not_name_are_removed_but_for_a_download_that_may_go_on(tmp_path: Path) -> None:
    folder = ReleaseFolder(tmp_path, TARGET)
    folder.change(taken(installed(1), installed(2)))
    files = folder.files
    kept = [files.path(digest(1)), files.path(digest(2)), files.partial_path(digest(9))]
    gone = [files.path(digest(3)), files.partial_path(digest(8))]
    for path in kept + gone:
        path.write_bytes(b"x")
    folder.tidy(digest(9))
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)
