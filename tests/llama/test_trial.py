"""Test that a draft is tried in a process of its own before anybody relies on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_gguf import vocabulary, write_tiny_llama

from outrider.core.errors import ModelRefused, VocabularyMismatch
from outrider.llama import trial
from outrider.llama.trial import survived, try_draft


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "draft.gguf")


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_truncated_draft_is_refused_by_name(draft: Path, share: float) -> None:
    data = draft.read_bytes()
    draft.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(
        ModelRefused, match=rf"^--draft {draft}: no token can be decoded with it: .*; download or export"
    ):
        try_draft(draft)


def test_a_crash_of_the_library_ends_the_child_alone(draft: Path, tmp_path: Path, monkeypatch) -> None:
    stand_in(tmp_path, monkeypatch, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(ModelRefused, match=r"llama\.cpp crashed on it \(SIGSEGV\)"):
        try_draft(draft)


def test_a_draft_of_another_vocabulary_is_refused_by_name_and_special_tokens_may_differ(tmp_path: Path) -> None:
    draft, tokenizer = write_tiny_llama(tmp_path / "d.gguf"), tmp_path / "tokenizer.json"
    spelt, kinds = vocabulary()
    plain = sum(kind == 1 for kind in kinds)
    added = [{"id": plain, "content": "<|other|>", "special": True}]
    vocab = {token: i for i, token in enumerate(spelt[:plain])}
    made = {"model": {"vocab": vocab}, "added_tokens": added, "decoder": {"type": "ByteLevel"}}
    tokenizer.write_text(json.dumps(made))
    assert try_draft(draft, tokenizer=tokenizer) == ""
    vocab["another"] = vocab.pop(spelt[40])
    tokenizer.write_text(json.dumps(made))
    with pytest.raises(VocabularyMismatch, match=rf"^--draft {draft}: draft and target differ in 1 of .* \(id 40: "):
        try_draft(draft, tokenizer=tokenizer)


HOSTILE = {
    "no layers": {"layers": 0},
    "an epsilon that is no number": {"epsilon": float("nan")},
    "an odd rope": {"rope": 15},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_a_header_at_which_the_library_aborts_ends_the_child_alone(tmp_path: Path, changes: dict[str, float]) -> None:
    hostile = write_tiny_llama(tmp_path / "draft.gguf", **changes)
    with pytest.raises(ModelRefused, match="no token can be decoded with it"):
        try_draft(hostile)


def test_a_file_that_takes_too_long_is_refused(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "while True: pass")
    monkeypatch.setattr(trial, "TIMEOUT_S", 0.05)
    with pytest.raises(ModelRefused, match="no token came within 0 s"):
        try_draft(draft)


def test_a_file_of_the_network_is_tried_once(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(trial, "try_draft", lambda file, name: tried.append(file) or "")
    for _ in range(3):
        survived(draft, "the draft")
    assert tried == [draft]
    (draft.parent / f"{draft.name}.tried").write_text("0.0.1")  # by another version of the library
    survived(draft, "the draft")
    assert len(tried) == 2


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put a package in the place of llama_cpp for processes that are started from now on."""
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").touch()
    (folder / "llama_cpp" / "llama_cpp.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
