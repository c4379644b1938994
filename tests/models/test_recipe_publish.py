"""Test what the recipe ships: it replaces what was there, and a target that learnt too little does not ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.recipe import export

GOOD = {"5-gram": {"code": 1.6, "arithmetic": 1.8}, "target": {"code": 1.2, "arithmetic": 1.1}}
BAD = {"5-gram": {"code": 1.6, "arithmetic": 1.8}, "target": {"code": 1.2, "arithmetic": 1.9}}


def made(work: Path, bits: dict[str, dict[str, float]]) -> Path:
    """Return a finished run's folder, with empty models."""
    target = work / "export" / "target"
    target.mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (target / name).write_bytes(b"new")
    for name in (*export.DRAFTS.values(), export.HEADS):
        (work / "export" / name).write_bytes(b"new")
    (work / "evaluate").mkdir()
    (work / "evaluate" / "README.md").write_text("# card")
    (work / "evaluate" / "results.json").write_text(json.dumps({"bits_per_byte": bits}))
    return work


def shipped(folder: Path) -> Path:
    """Write an earlier run's output: one shard, which would be loaded in the place of two."""
    (folder / "target").mkdir(parents=True)
    (folder / "target" / "model.safetensors").write_bytes(b"old")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "keep.py").write_text("")
    return folder


def test_a_published_pair_leaves_nothing_of_the_last_one(tmp_path: Path) -> None:
    destination = shipped(tmp_path / "models")
    export.publish(made(tmp_path / "work", GOOD), destination)
    assert sorted(path.name for path in (destination / "target").iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert (destination / "recipe" / "keep.py").exists()
    assert (destination / "README.md").read_text() == "# card"


def test_a_target_that_counting_beats_is_not_published(tmp_path: Path) -> None:
    destination = shipped(tmp_path / "models")
    with pytest.raises(ValueError, match=r"1\.900 bits per byte on arithmetic.*1\.800"):
        export.publish(made(tmp_path / "work", BAD), destination)
    assert (destination / "target" / "model.safetensors").read_bytes() == b"old"


def test_a_file_above_the_bound_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = made(tmp_path / "work", GOOD)
    monkeypatch.setattr(export, "_MAX_FILE", 2)
    with pytest.raises(ValueError, match="has 3 bytes"):
        export.publish(work, tmp_path / "models")
