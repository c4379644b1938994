"""Test a device's stored release state: wherever the device is killed, it returns to a good draft."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_agent.drafting.health import DraftHealth, FirstAcceptance, judge
from edge_agent.releases.folder import ReleaseFolder, folders, read
from edge_agent.releases.state import MAX_REFUSED, InstalledRelease, ReleaseState

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


def on_trial(state: ReleaseState, taken: InstalledRelease) -> ReleaseState:
    return state.take(taken, FirstAcceptance()).loaded()


def test_a_release_is_on_trial_until_it_has_shown_itself() -> None:
    state = on_trial(ReleaseState(), installed(1))
    assert state.current == installed(1) and state.last_good is None
    assert state.trial is not None and state.busy and state.floor == 0
    state = state.proven()
    assert state.trial is None and not state.busy and state.floor == 1


def test_a_canary_that_is_healthy_does_not_raise_the_floor_before_it_is_everybodys() -> None:
    state = on_trial(on_trial(ReleaseState(), installed(1)).proven(), installed(2, canary=True)).proven()
    assert state.floor == 1 and state.last_good == installed(1)
    assert state.take(installed(2), FirstAcceptance()).floor == 2


def test_the_stable_release_after_a_canary_that_was_rolled_back_is_the_one_before_and_needs_no_trial() -> None:
    state = on_trial(on_trial(ReleaseState(), installed(1)).proven(), installed(2, canary=True)).proven()
    back = state.take(installed(1), FirstAcceptance()).loaded()
    assert (
        back.current == installed(1)
        and back.trial is None
        and not back.busy
        and back.last_good == installed(2, canary=True)
    )


def test_a_trial_that_is_left_for_another_release_keeps_the_good_one_to_come_back_to() -> None:
    state = on_trial(on_trial(ReleaseState(), installed(1)).proven(), installed(2, canary=True))
    other = on_trial(state, installed(3, canary=True))
    assert other.current == installed(3, canary=True) and other.last_good == installed(1) and other.trial is not None
    assert on_trial(state, installed(1)).trial is None


def test_an_old_file_under_a_new_version_is_a_new_release() -> None:
    state = on_trial(on_trial(ReleaseState(), installed(1)).proven(), installed(2)).proven()
    again = state.take(installed(3, file=1), FirstAcceptance()).loaded()
    assert again.current == installed(3, file=1) and again.trial is None and again.floor == 3


def test_what_was_given_up_is_remembered_and_may_be_forgotten() -> None:
    state = on_trial(ReleaseState(), installed(4)).gave_up("worse", "x" * 1000, 5.0)
    refusal = state.refusal(installed(4).manifest)
    assert state.current is None and refusal is not None and refusal.kind == "worse" and len(refusal.reason) == 400
    assert state.refusal(installed(5).manifest) is None
    assert state.forgotten().refused == ()


def test_no_more_refusals_are_kept_than_fit() -> None:
    state = ReleaseState()
    for version in range(1, MAX_REFUSED + 10):
        state = on_trial(state, installed(version)).gave_up("failed", "it broke", 1.0)
    assert len(state.refused) == MAX_REFUSED and state.refused[-1].version == MAX_REFUSED + 9


def test_a_trial_goes_on_in_the_next_process_with_what_it_has_shown() -> None:
    state = ReleaseState().take(installed(1), FirstAcceptance(100, 60)).loaded().paused(FirstAcceptance(70, 40))
    assert not state.busy and state.trial is not None
    assert (state.trial.before, state.trial.now) == (FirstAcceptance(100, 60), FirstAcceptance(70, 40))
    stored = state.model_dump_json()
    assert '"before":{"guessed":100,"right":60}' in stored and ReleaseState.model_validate_json(stored) == state
    health = DraftHealth(state.trial.now)
    health.count(True)
    assert health.first_acceptance == FirstAcceptance(71, 41)


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (FirstAcceptance(256, 150), FirstAcceptance(60, 0), "early"),
        (FirstAcceptance(256, 150), FirstAcceptance(64, 0), "worse"),
        (FirstAcceptance(256, 150), FirstAcceptance(256, 90), "worse"),
        (FirstAcceptance(256, 150), FirstAcceptance(128, 70), "early"),
        (FirstAcceptance(256, 150), FirstAcceptance(256, 140), "healthy"),
        (FirstAcceptance(0, 0), FirstAcceptance(256, 0), "healthy"),
        (FirstAcceptance(20, 20), FirstAcceptance(256, 100), "healthy"),
    ],
)
def test_only_what_is_clearly_worse_is_called_so(before: FirstAcceptance, now: FirstAcceptance, verdict: str) -> None:
    assert judge(before, now) == verdict


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


def test_what_was_written_is_what_is_read(folder: ReleaseFolder, tmp_path: Path) -> None:
    state = on_trial(on_trial(ReleaseState(), installed(1)).proven(), installed(2, canary=True)).gave_up(
        "worse", "it was", 1.5
    )
    folder.write(state)
    folder.close()
    assert ReleaseFolder.open(tmp_path, TARGET).state == state
    assert list(folders(tmp_path)) == [(TARGET, folder.path)]


def test_a_device_keeps_its_random_id_and_another_has_another(folder: ReleaseFolder, tmp_path: Path) -> None:
    folder.write(folder.state)
    folder.close()
    assert ReleaseFolder.open(tmp_path, TARGET).state.device_id == folder.state.device_id
    assert ReleaseFolder.open(tmp_path / "other", TARGET).state.device_id != folder.state.device_id


def test_one_process_keeps_the_folder_and_others_only_read(folder: ReleaseFolder, tmp_path: Path) -> None:
    folder.write(on_trial(folder.state, installed(1)))
    other = ReleaseFolder.open(tmp_path, TARGET)
    assert not other.writable and other.state == folder.state
    with pytest.raises(PermissionError):
        other.write(ReleaseState())
    folder.close()
    assert ReleaseFolder.open(tmp_path, TARGET).writable


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"format": 2}',
        b'{"format": 1, "device_id": "../../etc"}',
        b'{"format": 1, "surprise": 1}',
        b'{"format": 1, "busy": true}',
        b'{"format": 1, "current": {"digest": "x", "version": 1, "canary": false, "manifest": "y"}}',
        b'{"format": 1, "floor": -1}',
        b'{"format": 1, "current": {"digest": "%b", "version": 1, "canary": false, "manifest": "%b"}, '
        b'"trial": {"before": {"guessed": -1, "right": 0}}}' % (b"a" * 64, b"b" * 64),
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
    assert "state.json cannot be used" in caplog.text and "without a release" in caplog.text
    assert again.state.current is None and again.state.floor == 0
    assert (again.path / "state.json.bad").read_bytes() == damaged


def test_files_that_the_state_does_not_name_are_removed_but_for_a_download_that_may_go_on(
    folder: ReleaseFolder,
) -> None:
    folder.write(on_trial(on_trial(folder.state, installed(1)).proven(), installed(2)))
    kept = [
        folder.files.path(installed(1).digest),
        folder.files.path(installed(2).digest),
        folder.path / f"{digest(9)}.partial",
    ]
    gone = [
        folder.files.path(installed(3).digest),
        folder.path / f"{digest(8)}.partial",
        folder.path / f"{digest(8)}.etag",
    ]
    for path in kept + gone:
        path.write_bytes(b"x")
    folder.tidy(digest(9))
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


class Killed(BaseException):
    """Stand for the end of the process."""


@pytest.mark.parametrize("at", ["fdopen", "fsync", "replace"])
def test_a_process_that_is_killed_while_it_writes_leaves_the_state_before_or_after(
    folder: ReleaseFolder, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = on_trial(ReleaseState(), installed(1)).proven()
    folder.write(before)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if at == "fdopen":
            half = lambda descriptor, _: (os.write(descriptor, b'{"format":'), os.close(descriptor), killed())  # noqa: E731
            patched.setattr(os, "fdopen", half)
        else:
            patched.setattr(os, at, killed)
        with pytest.raises(Killed):
            folder.write(on_trial(before, installed(2)))
    folder.close()
    assert ReleaseFolder.open(tmp_path, TARGET).state == before


def test_the_state_is_on_disk_before_it_is_said_to_be(folder: ReleaseFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    folder.write(on_trial(folder.state, installed(1)))
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder


class Device(RuleBasedStateMachine):
    """Act as a device that takes, tries and gives up releases, and is killed between any two writes of its state."""

    def __init__(self) -> None:
        super().__init__()
        self._root = tempfile.TemporaryDirectory()
        self.folder = ReleaseFolder.open(Path(self._root.name), TARGET)
        self.good: list[InstalledRelease | None] = [None]
        """Releases that were good at some time."""
        self.condemned: set[str] = set()
        self.highest = 0
        self.running = True

    def teardown(self) -> None:
        self.folder.close()
        self._root.cleanup()

    @property
    def state(self) -> ReleaseState:
        return self.folder.state

    def write(self, state: ReleaseState) -> None:
        self.folder.write(state)

    @precondition(lambda self: self.running)
    @rule(version=st.integers(1, 9), canary=st.booleans())
    def take(self, version: int, canary: bool) -> None:
        offered = installed(version, canary=canary)
        if version < self.state.floor or self.state.refusal(offered.manifest):
            return
        self.write(self.state.take(offered, FirstAcceptance(10, 5)))
        assert self.state.current is not None and self.state.current.digest == offered.digest

    @precondition(lambda self: self.running and self.state.current is not None)
    @rule()
    def load(self) -> None:
        self.write(self.state.loading())
        self.write(self.state.loaded())

    @precondition(lambda self: self.running and self.state.trial is not None)
    @rule()
    def prove(self) -> None:
        self.write(self.state.proven())
        self.good.append(self.state.current)

    @precondition(lambda self: self.running and self.state.current is not None)
    @rule()
    def fail(self) -> None:
        assert self.state.current is not None
        self.condemned.add(self.state.current.manifest)
        self.write(self.state.gave_up("failed", "it broke", 1.0))

    @precondition(lambda self: self.running)
    @rule()
    def end_in_order(self) -> None:
        self.write(self.state.paused(FirstAcceptance(3, 2)))
        self.folder.close()
        self.running = False

    @precondition(lambda self: self.running)
    @rule()
    def kill(self) -> None:
        self.folder.close()  # which the kernel does: the lock goes with the process
        self.running = False

    @precondition(lambda self: not self.running)
    @rule()
    def start(self) -> None:
        self.folder = ReleaseFolder.open(Path(self._root.name), TARGET)
        assert self.folder.writable
        self.running = True
        before = self.state
        if before.busy:
            assert before.current is not None
            self.condemned.add(before.current.manifest)
            self.write(before.gave_up("crashed", "the process ended", 1.0))
            assert self.state.current == before.last_good

    @rule()
    def forget(self) -> None:
        if self.running:
            self.write(self.state.forgotten())
            self.condemned.clear()

    @invariant()
    def what_is_on_disk_is_what_is_known(self) -> None:
        found = read(self.folder.path, keep=False)
        if (self.folder.path / "state.json").exists():
            assert found == self.state
            json.loads((self.folder.path / "state.json").read_bytes())

    @invariant()
    def the_floor_never_falls(self) -> None:
        assert self.state.floor >= self.highest
        self.highest = self.state.floor

    @invariant()
    def nothing_that_was_given_up_is_in_use(self) -> None:
        for held in (self.state.current, self.state.last_good):
            assert held is None or held.manifest not in self.condemned

    @invariant()
    def what_is_come_back_to_was_good(self) -> None:
        known = {held.digest for held in self.good if held is not None}
        last = self.state.last_good
        assert last is None or last.digest in known

    @invariant()
    def the_two_releases_have_different_files(self) -> None:
        current, last = self.state.current, self.state.last_good
        assert current is None or last is None or current.digest != last.digest


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
