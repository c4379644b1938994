"""Test that loading a GGUF gives its properties and refuses what does not fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny_gguf import MERGES, PADDING, SPECIAL, write_tiny_llama

from outrider.core.errors import BadRequest, ModelRefused
from outrider.llama import LlamaModel, TreeContext


def test_the_token_table_holds_the_bytes_that_each_id_stands_for(model: LlamaModel) -> None:
    table = model.token_table()
    merged = [merge.replace(" ", "").replace("Ġ", " ").encode() for merge in MERGES]
    special = [token.encode() for token in SPECIAL]
    assert table == [bytes([i]) for i in range(256)] + merged + special + [b""] * PADDING

    end = len(table) - PADDING
    assert model.special_ids() == set(range(end - len(SPECIAL), end))


def test_added_runs_of_blanks_are_blanks_however_the_file_spells_them(tmp_path: Path) -> None:
    with LlamaModel.load(write_tiny_llama(tmp_path / "spm.gguf", sentencepiece=True)) as model:
        assert model.token_table()[-3:] == [b" ", b" a", b"  "]
        assert model.special_ids() == {0, 1, 2, model.vocab_size - 1}


@pytest.mark.parametrize("threads", [0, 1 << 16])
def test_threads_that_the_machine_has_not_are_refused(tiny_path: Path, threads: int) -> None:
    with pytest.raises(BadRequest, match="threads is"):
        LlamaModel.load(tiny_path, threads=threads)


@pytest.mark.parametrize("kept", [4, 20, 300, 5_000, 200_000, -1])
def test_a_truncated_file_is_refused_with_the_reason(tiny_path: Path, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_path.read_bytes()[:kept])
    with pytest.raises(ModelRefused) as refused:
        LlamaModel.load(path)
    assert "no reason" not in str(refused.value)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "nan.gguf", nan=True)
    with pytest.raises(ModelRefused, match=r"blk\.0\.ffn_up") as refused:
        LlamaModel.load(path)
    assert str(refused.value).count("; ") < 3


def test_loading_writes_nothing_to_the_terminal_or_the_log(
    tiny_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LlamaModel.load(tiny_path) as model, TreeContext(model, n_ctx=64) as context:
        context.reset([1, 2, 3])
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
