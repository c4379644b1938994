"""Test that a draft is tried in a process of its own before anybody relies on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_gguf import write_tiny_llama

from outrider.core.errors import ModelRefused
from outrider.llama.trial import try_draft


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "draft.gguf")


def test_a_whole_draft_decodes_a_token(draft: Path) -> None:
    assert try_draft(draft) == ""


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_truncated_draft_is_refused_by_name(draft: Path, share: float) -> None:
    data = draft.read_bytes()
    draft.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(
        ModelRefused, match=rf"^--draft {draft}: no token can be decoded with it: .*; download or export"
    ):
        try_draft(draft)


def test_weights_that_are_no_numbers_are_refused(draft: Path) -> None:
    data = draft.read_bytes()
    draft.write_bytes(data[: len(data) - 100_000] + b"\xff" * 100_000)
    with pytest.raises(ModelRefused, match="no token can be decoded"):
        try_draft(draft)


def test_a_crash_of_the_library_ends_the_child_alone(draft: Path, tmp_path: Path, monkeypatch) -> None:
    stand_in(tmp_path, monkeypatch, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(ModelRefused, match=r"llama\.cpp crashed on it \(SIGSEGV\)"):
        try_draft(draft)


def test_without_the_library_it_says_that_it_did_not_try(draft: Path, tmp_path: Path, monkeypatch) -> None:
    stand_in(tmp_path, monkeypatch, "raise ImportError('not here')")
    assert "llama-cpp-python cannot be imported (not here)" in try_draft(draft)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put a package in the place of llama_cpp for processes that are started from now on."""
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").touch()
    (folder / "llama_cpp" / "llama_cpp.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
