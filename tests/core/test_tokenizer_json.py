"""Test the token table of a tokenizer.json, read as data; broken and malicious files are refused in one way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

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
    "decoder",
    [
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.ByteLevel(),
    ],
    ids=["replace", "metaspace", "byte level"],
)
def test_added_tokens_are_what_the_tokenizer_decodes_them_to_and_special_ones_their_text(decoder: Any) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "\u0120b": 1, "\u2581c": 2, "<0x41>": 3}, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_tokens(
        ["\u2581\u2581", "\u2581x", "  ", "\n\n", "<\uff5cUser\u2581\uff5c>", "\u0120\u0120", "caf\u00e9 "]
    )
    tokenizer.add_tokens([AddedToken("<\u2581end>", special=True)])
    *table, end = token_table(tokenizer.to_str())
    assert end == "<\u2581end>".encode()
    metaspace = isinstance(decoder, decoders.Metaspace)
    for i, piece in enumerate(table):
        if not (metaspace and i == 3):  # Metaspace alone knows no pieces of bytes, which no such vocabulary has
            assert piece.decode(errors="replace") == tokenizer.decode([i])


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
