"""Test text as it is delivered: whole characters, silent special tokens, stop strings cut wherever they fall."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from small_pair import TOKENIZER

from edge_agent.target.detokenizer import Detokenizer, StopScanner, text_of
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import ModelRefused

BYTES = [bytes([i]) for i in range(256)]


def test_text_in_pieces_is_the_text_as_a_whole_whatever_the_chunks() -> None:
    text = "naïve 日本語 🙂🏽 \r\n\t end"
    rng = random.Random(5)
    for _ in range(200):
        detokenizer, tokens, out = Detokenizer(BYTES), list(text.encode()), ""
        while tokens:
            size = rng.randint(1, 5)
            chunk, tokens = tokens[:size], tokens[size:]
            out += text_of(chunk, detokenizer, StopScanner(()), last=not tokens)[0]
            assert text.startswith(out)
        assert out == text


def test_what_only_began_like_a_stop_string_is_given_back() -> None:
    scanner = StopScanner(["</s>", "</so>"])
    assert scanner.feed("x</s") == "x"
    assert scanner.feed("ofa>") == "</sofa>"
    assert not scanner.hit
    assert scanner.feed("</") == "" and scanner.flush() == "</"


def test_any_chunking_finds_the_same_stop() -> None:
    text, rng = "aabaabaac", random.Random(1)
    for _ in range(300):
        scanner, out, at = StopScanner(["aabaac"]), "", 0
        while at < len(text):
            size = rng.randint(1, 4)
            out += scanner.feed(text[at : at + size])
            at += size
        assert scanner.hit and out == "aab"


def test_tokens_after_the_one_that_completes_the_stop_do_not_count() -> None:
    detokenizer, stops = Detokenizer(BYTES), StopScanner(["##"])
    assert text_of(list(b"ab#"), detokenizer, stops, last=False) == ("ab", 3, False)
    assert text_of(list(b"#xyz"), detokenizer, stops, last=False) == ("", 1, True)


# --- the tokenizer's file


TEXT = "def add(a, b):\n    return a + b\n"


def tokenizer_with(**changes: Any) -> bytes:
    return json.dumps(json.loads(TOKENIZER.read_bytes()) | changes).encode()


def charsmap(encoded: str) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": encoded}


def test_a_stored_truncation_or_padding_leaves_prompts_whole() -> None:
    plain = TargetTokenizer(TOKENIZER.read_bytes())
    marked = TargetTokenizer(
        tokenizer_with(
            truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            padding={
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 1,
                "pad_type_id": 0,
                "pad_token": "<|pad|>",
            },
        )
    )
    assert len(plain.encode_plain(TEXT)) > 4
    for encode in ("encode", "encode_plain", "encode_prompt"):
        assert getattr(marked, encode)(TEXT) == getattr(plain, encode)(TEXT)


def test_a_file_at_which_the_library_panics_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"tokenizer\.json cannot be read"):
        TargetTokenizer(tokenizer_with(normalizer=charsmap("AAAA")))


def test_a_text_at_which_the_library_panics_is_refused() -> None:
    tokenizer = TargetTokenizer(tokenizer_with(normalizer=charsmap("BAAAAAAAAAA=")))
    with pytest.raises(ModelRefused, match="fails on this text"):
        tokenizer.encode_plain(TEXT)
