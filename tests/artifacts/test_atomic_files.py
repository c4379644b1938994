"""Test that files are replaced whole or not at all, and are on disk before their writer goes on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from outrider.artifacts import atomic_files


class Killed(BaseException):
    """Stand for the end of the process."""


def test_a_file_is_created_with_its_mode_and_never_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(stat.S_IMODE(os.stat(a).st_mode)), replace(a, b)))
    atomic_files.write(tmp_path / "key", b"secret", mode=0o600)
    assert seen == [0o600] and stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert (tmp_path / "key").read_bytes() == b"secret"


@pytest.mark.parametrize("at", ["fdopen", "fsync", "replace"])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_files.write(path, b"old")

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, at, killed)
        with pytest.raises(Killed):
            atomic_files.write(path, b"new")
        with pytest.raises(Killed), atomic_files.replacing(path) as partial:
            partial.write_bytes(b"new")
            killed()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_bytes_and_name_are_on_disk_before_a_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    atomic_files.write(tmp_path / "one", b"1")
    with atomic_files.replacing(tmp_path / "two") as partial:
        partial.write_bytes(b"2")
    assert calls == ["fsync", "replace", "fsync"] * 2  # the file, its name, the folder


def test_a_lock_is_one_holders_until_it_closes_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = atomic_files.lock(path)
    assert held is not None and atomic_files.lock(path) is None
    held.close()
    again = atomic_files.lock(path)
    assert again is not None
    again.close()
