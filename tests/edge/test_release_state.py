"""Test a device's stored release state: wherever the device is killed, it returns to a good draft."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_agent.releases.folder import ReleaseFolder, folders, read
from edge_agent.releases.state import MAX_REASON, MAX_REFUSED, MOST_LOADS, InstalledRelease, ReleaseState

TARGET = "sha256:" + "a" * 64


def digest(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def installed(version: int, *, canary: bool = False, file: object = None) -> InstalledRelease:
    return InstalledRelease(
        digest=digest(file if file is not None else version),
        version=version,
        canary=canary,
        manifest=digest(("manifest", version)),
    )


def loaded(*releases: InstalledRelease) -> ReleaseState:
    """Return the state after these releases were taken and loaded, one after another."""
    state = ReleaseState()
    for release in releases:
        state = state.take(release).loading().loaded()
    return state


def test_a_stable_release_that_was_loaded_raises_the_floor_and_a_canary_does_once_it_is_everybodys() -> None:
    assert ReleaseState().take(installed(1)).loading().floor == 0
    state = loaded(installed(1), installed(2, canary=True))
    assert state.floor == 1 and state.take(installed(2)).floor == 2


def test_canaries_one_after_another_keep_the_stable_release_to_come_back_to() -> None:
    state = loaded(installed(1), installed(2, canary=True), installed(3, canary=True))
    assert state.last_good == installed(1) and state.dropped().current == installed(1)
    back = state.take(installed(1)).loading().loaded()
    assert back.current == installed(1) and back.last_good is None


def test_what_was_given_up_is_remembered_up_to_a_number_and_may_be_forgotten() -> None:
    state = ReleaseState()
    for version in range(1, MAX_REFUSED + 10):
        state = state.take(installed(version)).gave_up("unusable", "x" * 1000, 1.0)
    refusal = state.refusal(installed(MAX_REFUSED + 9).manifest)
    assert refusal is not None and len(refusal.reason) == MAX_REASON and state.current is None
    assert len(state.refused) == MAX_REFUSED and state.refusal(installed(1).manifest) is None
    assert state.forgotten().refused == ()


# --- on disk


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReleaseFolder]]:
    """Keep all folders that a test opens, and close those that it leaves open."""
    opened_folders: list[ReleaseFolder] = []
    original = ReleaseFolder.open

    def opening(*arguments: Any) -> ReleaseFolder:
        opened_folders.append(original(*arguments))
        return opened_folders[-1]

    monkeypatch.setattr(ReleaseFolder, "open", opening)
    yield opened_folders
    for one in opened_folders:
        one.close()


@pytest.fixture
def folder(tmp_path: Path) -> ReleaseFolder:
    return ReleaseFolder.open(tmp_path, TARGET)


def test_one_process_keeps_the_folder_and_others_read_what_it_wrote(folder: ReleaseFolder, tmp_path: Path) -> None:
    folder.write(loaded(installed(1), installed(2, canary=True)).gave_up("unusable", "it was", 1.5))
    other = ReleaseFolder.open(tmp_path, TARGET)
    assert not other.writable and other.state == folder.state
    with pytest.raises(PermissionError):
        other.write(ReleaseState())
    folder.close()
    again = ReleaseFolder.open(tmp_path, TARGET)
    assert again.writable and again.state == folder.state
    assert list(folders(tmp_path)) == [(TARGET, folder.path)]


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xfe",
        b'{"format": 2}',
        b'{"format": 1, "surprise": 1}',
        b'{"format": 1, "device_id": "../../etc"}',
        b'{"format": 1, "current": {"digest": "x", "version": 1, "canary": false, "manifest": "y"}}',
        b'{"format": 1, "floor": -1}',
        b" " * 70_000,
    ],
)
def test_a_state_that_makes_no_sense_is_said_put_aside_and_begun_anew(
    folder: ReleaseFolder, tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder.path / "state.json").write_bytes(damaged)
    folder.close()
    with caplog.at_level(logging.WARNING):
        again = ReleaseFolder.open(tmp_path, TARGET)
    assert "state.json cannot be used" in caplog.text
    assert again.state.current is None and again.state.floor == 0
    assert (again.path / "state.json.bad").read_bytes() == damaged


def test_files_that_the_state_does_not_name_are_removed_but_for_a_download_that_may_go_on(
    folder: ReleaseFolder,
) -> None:
    folder.write(loaded(installed(1), installed(2)))
    files = folder.files
    kept = [files.path(digest(1)), files.path(digest(2)), files.partial_path(digest(9))]
    gone = [files.path(digest(3)), files.partial_path(digest(8))]
    for path in kept + gone:
        path.write_bytes(b"x")
    folder.tidy(digest(9))
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


class Device(RuleBasedStateMachine):
    """Act as a device that takes, loads and gives up releases, and is killed between any two writes of its state."""

    def __init__(self) -> None:
        super().__init__()
        self._root = tempfile.TemporaryDirectory()
        self.folder = ReleaseFolder.open(Path(self._root.name), TARGET)
        self.good: set[str] = set()
        """Digests of the stable releases that were loaded at some time."""
        self.condemned: set[str] = set()
        self.highest = 0
        self.running = True

    def teardown(self) -> None:
        self.folder.close()
        self._root.cleanup()

    @property
    def state(self) -> ReleaseState:
        return self.folder.state

    @precondition(lambda self: self.running)
    @rule(version=st.integers(1, 9), canary=st.booleans())
    def take(self, version: int, canary: bool) -> None:
        offered = installed(version, canary=canary)
        if version < self.state.floor or self.state.refusal(offered.manifest):
            return
        self.folder.write(self.state.take(offered))
        self.load()

    @precondition(lambda self: self.running and self.state.current is not None)
    @rule()
    def load(self) -> None:
        current = self.state.current
        assert current is not None
        self.folder.write(self.state.loading())
        self.folder.write(self.state.loaded())
        if not current.canary:
            self.good.add(current.digest)

    @precondition(lambda self: self.running and self.state.current is not None)
    @rule()
    def fail(self) -> None:
        assert self.state.current is not None
        self.condemned.add(self.state.current.manifest)
        self.folder.write(self.state.loading())
        self.folder.write(self.state.gave_up("unusable", "it broke", 1.0))

    @precondition(lambda self: self.running)
    @rule(loading=st.booleans())
    def kill(self, loading: bool) -> None:
        if loading and self.state.current is not None:
            self.folder.write(self.state.loading())
        self.folder.close()  # which the kernel does: the lock goes with the process
        self.running = False

    @precondition(lambda self: not self.running)
    @rule()
    def start(self) -> None:
        self.folder = ReleaseFolder.open(Path(self._root.name), TARGET)
        assert self.folder.writable
        self.running = True
        before = self.state
        if before.loads >= MOST_LOADS:
            assert before.current is not None
            self.condemned.add(before.current.manifest)
            self.folder.write(before.gave_up("crashed", "the process ended", 1.0))
            assert self.state.current == before.last_good

    @precondition(lambda self: self.running)
    @rule()
    def forget(self) -> None:
        self.folder.write(self.state.forgotten())
        self.condemned.clear()

    @invariant()
    def what_is_on_disk_is_what_is_known(self) -> None:
        if (self.folder.path / "state.json").exists():
            assert read(self.folder.path, keep=False) == self.state

    @invariant()
    def the_floor_never_falls(self) -> None:
        assert self.state.floor >= self.highest
        self.highest = self.state.floor

    @invariant()
    def nothing_that_was_given_up_is_in_use_or_come_back_to(self) -> None:
        held = {one.manifest for one in (self.state.current, self.state.last_good) if one is not None}
        assert not held & self.condemned

    @invariant()
    def what_is_come_back_to_was_loaded_and_has_another_file(self) -> None:
        current, last = self.state.current, self.state.last_good
        assert last is None or last.digest in self.good
        assert current is None or last is None or current.digest != last.digest


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
