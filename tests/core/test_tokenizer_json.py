"""Test the token table of a tokenizer.json, read as data; broken and malicious files are refused in one way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.core.errors import ModelRefused
from outrider.core.vocabulary import token_table


def made(vocab: Any, added: Any = (), decoder: str = "ByteLevel") -> str:
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": added, "decoder": {"type": decoder}})


def test_pieces_become_bytes_added_tokens_their_text_and_gaps_are_empty() -> None:
    assert token_table(made({"a": 0, "\u0120b": 1}, [{"id": 3, "content": "<|end|>"}])) == [
        b"a",
        b" b",
        b"",
        b"<|end|>",
    ]


def test_unigram_pieces_are_numbered_in_order() -> None:
    assert token_table(made([["<0x0A>", 0.0], ["\u2581x", -1.5]], decoder="Metaspace")) == [b"\n", b" x"]


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "[" * 100_000,
        "{}",
        '{"model": {}}',
        made({"a": 10**11}),
        made({"a": -1}),
        made({"a": True}),
        made([["a"]]),
        made({"a": 0}, [{"id": 1, "content": 5}]),
        made({"\ud800": 0}),
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_file_is_refused(broken: str | bytes) -> None:
    with pytest.raises(ModelRefused, match=r"no tokenizer\.json"):
        token_table(broken)
