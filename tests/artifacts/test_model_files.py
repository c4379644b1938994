"""Test what is found in the files of a target and a draft without loading them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.artifacts.model_files import check_gguf, check_target, weight_files
from outrider.core.errors import ModelRefused


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for shard in shards:
        save_file({shard: np.ones((40, 5), np.float32)}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {shard: shard for shard in shards}}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        check_target(folder, "--model")
    return str(caught.value)


def test_files_that_hold_the_weights_again_are_not_among_them(target: Path) -> None:
    shards = sorted(target.glob("*.safetensors"))
    (target / "consolidated.safetensors").write_bytes(b"damaged")
    check_target(target)
    assert weight_files(target) == shards
    save_file({}, target / "adapter_model.safetensors")
    assert weight_files(target) == [target / "adapter_model.safetensors", *shards]
    for file in (*shards, target / "adapter_model.safetensors", target / "model.safetensors.index.json"):
        file.unlink()
    assert weight_files(target) == [target / "consolidated.safetensors"]
    assert "it has consolidated.safetensors, but neither model.safetensors nor model.safetensors.index" in refusal(
        target
    )
    save_file({}, target / "model.safetensors")
    assert weight_files(target) == [target / "model.safetensors"]


@pytest.mark.parametrize("left", [0, 7, 8, 50, -1])
def test_a_truncated_shard_is_named_without_reading_its_weights(target: Path, left: int) -> None:
    shard = target / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:left])
    said = refusal(target)
    assert said.startswith(f"--model {target}: model-00002-of-00003.safetensors is ") and "truncated" in said


def test_shards_without_their_index_are_refused_and_a_missing_one_is_named(target: Path) -> None:
    index, third = target / "model.safetensors.index.json", target / "model-00003-of-00003.safetensors"
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        assert "index.json does not say which tensor is in which file" in refusal(target)
    index.unlink()
    assert "it has model-00001-of-00003.safetensors, but neither" in refusal(target)
    check_target(target, needs_weights=False)
    third.unlink()
    with pytest.raises(ModelRefused, match=r"model-00003-of-00003\.safetensors is missing"):
        check_target(target, needs_weights=False)


def test_a_shard_of_another_model_is_refused_by_the_tensors_that_it_lacks(target: Path) -> None:
    shard = target / "model-00002-of-00003.safetensors"
    shard.write_bytes((target / "model-00001-of-00003.safetensors").read_bytes())
    assert f"{shard.name} lacks 1 of the tensors that model.safetensors.index.json has in it" in refusal(target)


def test_an_adapter_without_its_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    save_file({}, tmp_path / "adapter_model.safetensors")
    assert "it is an adapter alone, of org/base; merge it" in refusal(tmp_path)


def test_a_pointer_of_git_lfs_and_other_content_are_told_apart(target: Path) -> None:
    shard = target / "model-00001-of-00003.safetensors"
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a pointer of Git LFS" in refusal(target)
    shard.write_bytes((4).to_bytes(8, "little") + b"[1]x" + bytes(80))
    assert "is no safetensors file: its header cannot be read" in refusal(target)
    shard.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "is no safetensors file: its header cannot be read" in refusal(target)


def test_a_target_without_weights_is_refused_unless_the_engine_reads_others(target: Path) -> None:
    for file in (*target.glob("*.safetensors"), target / "model.safetensors.index.json"):
        file.unlink()
    assert "it has no *.safetensors" in refusal(target)
    check_target(target, needs_weights=False)


def test_a_draft_is_refused_by_name_unless_it_begins_as_gguf(tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    with pytest.raises(
        ModelRefused, match=rf"--draft {file}: no such file; give the path of a GGUF file, or org.*, or auto$"
    ):
        check_gguf(file, others="auto")
    file.write_bytes(b"PK")
    with pytest.raises(ModelRefused, match="it is no GGUF file, it begins with b'PK'"):
        check_gguf(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelRefused, match="git lfs pull"):
        check_gguf(file)
    file.write_bytes(b"GGUF")
    check_gguf(file)


def test_a_draft_in_parts_needs_all_of_them_and_is_named_by_the_first(tmp_path: Path) -> None:
    first, second = (tmp_path / f"d-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"GGUF")
    with pytest.raises(ModelRefused, match=rf"--draft {first}: its part {second.name}: no such file"):
        check_gguf(first)
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelRefused, match=rf"its part {second.name}: it is a pointer of Git LFS"):
        check_gguf(first)
    second.write_bytes(b"GGUF")
    check_gguf(first)
    with pytest.raises(ModelRefused, match=rf"{second}: it is one of 2 parts; give the first one, {first.name}"):
        check_gguf(second)
