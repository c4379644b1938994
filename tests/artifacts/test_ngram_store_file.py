"""Test that files of n-gram stores survive the disk, and that no hostile one gets further than an error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from outrider.artifacts import ngram_store
from outrider.artifacts.ngram_store import NgramStore
from outrider.core.errors import BadRequest, ModelRefused
from outrider.core.ngram import NgramModel, NgramTable

VOCABULARY = 100
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 40, 400).tolist() for _ in range(6)]
ARRAYS = ("keys", "starts", "totals", "tokens", "counts")


def store() -> NgramStore:
    table = NgramTable.build(TEXTS, least_sequences=2)
    return NgramStore(table, "sha256:weights", "sha256:tokens", "a", least_sessions=2, sessions=6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store().save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("mapped", [True, False])
def test_a_store_survives_the_disk(path: Path, mapped: bool) -> None:
    found, own = NgramStore.load(path, VOCABULARY, mapped=mapped), store()
    assert all(np.array_equal(found.table.arrays()[name], own.table.arrays()[name]) for name in ARRAYS)
    facts = ("weights_hash", "tokenizer_hash", "tenant", "least_sessions", "sessions", "size")
    assert [getattr(found, name) for name in facts] == [getattr(own, name) for name in facts]
    assert all(not array.flags.owndata for array in found.table.arrays().values())
    told, read = NgramModel([own.table]), NgramModel([found.table])
    told.reset(TEXTS[0][:50])
    read.reset(TEXTS[0][:50])
    assert [part.tolist() for part in told.following()] == [part.tolist() for part in read.following()]


def test_an_empty_store_survives_the_disk(tmp_path: Path) -> None:
    nothing = NgramStore(NgramTable.build([]), "w", "t", "a", 2, 0)
    nothing.save(tmp_path / "a.safetensors")
    assert not len(NgramStore.load(tmp_path / "a.safetensors", VOCABULARY).table.keys)


def test_any_reader_of_safetensors_reads_the_file(path: Path) -> None:
    found = load_file(path)
    assert all(np.array_equal(found[name], array) for name, array in store().table.arrays().items())


def test_a_mapped_store_goes_on_after_its_file_was_replaced_and_removed(path: Path) -> None:
    table = NgramStore.load(path, VOCABULARY).table
    NgramStore(NgramTable.build([]), "w", "t", "a", 2, 0).save(path)
    path.unlink()
    assert np.array_equal(table.tokens, store().table.tokens)


def test_a_store_that_was_read_into_memory_goes_on_after_its_file_was_truncated(path: Path) -> None:
    table = NgramStore.load(path, VOCABULARY, mapped=False).table
    with path.open("r+b") as file:
        file.truncate(0)
    assert np.array_equal(table.tokens, store().table.tokens)


@pytest.mark.parametrize("wanted", [{"weights_hash": "x"}, {"weights_hash": "sha256:weights", "tokenizer_hash": "x"}])
def test_a_store_of_another_target_or_tokenizer_is_refused(wanted: dict[str, str]) -> None:
    with pytest.raises(ModelRefused, match="the n-gram store is of the"):
        store().check(**wanted)


def test_a_store_of_another_tenant_is_refused() -> None:
    store().check(weights_hash="sha256:weights", tokenizer_hash="sha256:tokens", tenant="a")
    store().check(weights_hash="sha256:weights")
    with pytest.raises(ModelRefused, match="tenant 'a', here is 'b'"):
        store().check(weights_hash="sha256:weights", tenant="b")


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _file(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _header_with(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header, body = _parts(data)
        header[name] |= changes
        return _file(header, body)

    return change


def _with_values(name: str, change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, body = _parts(data)
        first, end = header[name]["data_offsets"]
        values = np.frombuffer(body[first:end], store().table.arrays()[name].dtype).copy()
        change(values)
        return _file(header, body[:first] + values.tobytes() + body[end:])

    return changed


def _set(index: int, value: int) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        values[index] = value

    return change


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "eight bytes": lambda data: data[:8],
    "half of it": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a header of all 64 bits": lambda data: b"\xff" * 8 + data[8:],
    "a header beyond the file": lambda data: struct.pack("<Q", len(data)) + data[8:],
    "a header of lists": lambda data: _file(b"[" * 60_000, b""),
    "a header that is a number": lambda data: _file(b"1", b""),
    "a header with a huge number": lambda data: _file(b"9" * 60_000, b""),
    "no metadata": lambda data: _file({}, _parts(data)[1]),
    "another format": _header_with("__metadata__", format="outrider-ngrams-9"),
    "n-grams of one session": _header_with("__metadata__", least_sessions="1"),
    "a tenant with a line's end": _header_with("__metadata__", tenant="a\nb"),
    "no tenant": _header_with("__metadata__", tenant=""),
    "another type": _header_with("tokens", dtype="F32"),
    "a giant shape": _header_with("tokens", shape=[2**62]),
    "a negative shape": _header_with("tokens", shape=[-1]),
    "a shape that is text": _header_with("tokens", shape=["1"]),
    "a shape that is true": _header_with("tokens", shape=[True]),
    "two dimensions": _header_with("tokens", shape=[1, 1]),
    "an end beyond the file": _header_with("counts", data_offsets=[0, 2**40]),
    "a negative offset": _header_with("counts", data_offsets=[-8, 0]),
    "offsets that are no numbers": _header_with("counts", data_offsets=[0.0, 4.0]),
    "keys out of order": _with_values("keys", _set(3, 0)),
    "a start beyond the end": _with_values("starts", _set(2, 2**40)),
    "a start before the beginning": _with_values("starts", _set(2, -5)),
    "a first start within": _with_values("starts", _set(0, 1)),
    "totals below their counts": _with_values("totals", _set(0, 0)),
    "negative totals": _with_values("totals", _set(0, -(2**63))),
    "giant totals": _with_values("totals", _set(0, 2**63 - 1)),
    "a negative token": _with_values("tokens", _set(0, -1)),
    "a token that the target has not": _with_values("tokens", _set(0, VOCABULARY)),
    "a count of nothing": _with_values("counts", _set(0, 0)),
    "a negative count": _with_values("counts", _set(0, -(2**31))),
    "a giant count": _with_values("counts", _set(0, 2**31 - 1)),
}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error_that_says_so(path: Path, name: str, mapped: bool) -> None:
    path.write_bytes(HOSTILE[name](path.read_bytes()))
    with pytest.raises(BadRequest, match="is no n-gram store"):
        NgramStore.load(path, VOCABULARY, mapped=mapped)


def test_a_file_that_is_too_large_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_store, "MAX_BYTES", 1_000)
    with pytest.raises(BadRequest, match="must be 9 to 1000"):
        NgramStore.load(path, VOCABULARY)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_store_with_altered_bytes_is_refused_or_predicts_tokens_of_the_target(path: Path, data: Any) -> None:
    store().save(path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        table = NgramStore.load(path, VOCABULARY, mapped=False).table
    except BadRequest:
        return
    model = NgramModel([table])
    for context in TEXTS[0][:30]:
        model.extend([context])
        ids, log_q = model.following()
        assert len(ids) == 0 or (ids.min() >= 0 and ids.max() < VOCABULARY)
        assert np.all(log_q <= 1e-9) and np.all(np.isfinite(log_q))
