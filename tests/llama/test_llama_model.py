"""Test that loading a GGUF gives its properties, refuses what does not fit, and tokenises."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_gguf import MERGES, PADDING, SPECIAL, vocabulary, write_tiny_llama

from outrider.core.errors import BadRequest, InternalError, ModelRefused
from outrider.llama import LlamaModel, TreeContext, library


def test_the_token_table_holds_the_bytes_that_each_id_stands_for(model: LlamaModel) -> None:
    table = model.token_table()
    merged = [merge.replace(" ", "").replace("Ġ", " ").encode() for merge in MERGES]
    special = [token.encode() for token in SPECIAL]
    assert table == [bytes([i]) for i in range(256)] + merged + special + [b""] * PADDING


def test_tokens_of_a_text_spell_the_text(model: LlamaModel) -> None:
    table = model.token_table()
    for text in ("hello world", "", "ça va? 日本 🙂\n\t", "a\0b", " " * 70):
        assert b"".join(table[i] for i in model.tokenize(text)) == text.encode()


def test_a_control_token_spelt_out_by_a_user_is_plain_text(model: LlamaModel) -> None:
    control = {vocabulary()[0].index(token) for token in SPECIAL}
    for token in SPECIAL:
        ids = model.tokenize(f"a{token}b")
        assert control.isdisjoint(ids)
        assert len(ids) == len(token) + 2


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


def test_more_threads_than_cores_are_refused(tiny_path: Path) -> None:
    with pytest.raises(BadRequest, match="threads"):
        LlamaModel.load(tiny_path, threads=10_000)


def test_loading_writes_nothing_to_the_terminal_or_the_log(
    tiny_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LlamaModel.load(tiny_path) as model, TreeContext(model, n_ctx=64) as context:
        context.reset([1, 2, 3])
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_model_closed_before_its_context_lives_until_the_context_is_closed(tiny_path: Path) -> None:
    model = LlamaModel.load(tiny_path)
    context = TreeContext(model, n_ctx=64)
    model.close()
    assert context.reset([1, 2, 3]).shape == (context.vocab_size,)
    with pytest.raises(InternalError, match="closed"):
        TreeContext(model, n_ctx=64)
    context.close()
    model.close()


def test_without_llama_cpp_the_error_names_the_extra(tiny_path: Path) -> None:
    code = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from outrider.llama import LlamaModel\n"
        "try: LlamaModel.load(sys.argv[1])\n"
        "except ImportError as error: assert 'outrider[edge]' in str(error)\n"
        "else: sys.exit('no error')"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_path)], check=True, timeout=60)


def test_threads_that_load_the_library_at_once_set_one_log_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would free the first while llama.cpp still calls it, which ends the process."""
    callbacks: list[object] = []

    class Bindings:
        def llama_log_callback(self, function: object) -> object:
            time.sleep(0.05)
            return object()

        def llama_log_set(self, callback: object, user_data: object) -> None:
            callbacks.append(callback)

        def llama_backend_init(self) -> None: ...

    bindings = Bindings()
    monkeypatch.setattr("outrider.llama.library.importlib.import_module", lambda name: bindings)
    monkeypatch.setattr(library, "_load", functools.cache(library._load.__wrapped__))
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: library.library(), range(8))) == {bindings}
    assert len(callbacks) == 1
