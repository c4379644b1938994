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


def test_a_character_that_the_end_cuts_is_dropped_and_invalid_bytes_before_it_are_shown() -> None:
    for tokens, text in (
        (b"ab\xf0\x9f\x99", "ab"),  # the beginning of a character of four bytes
        (b"a\xff\xe2\x82", "a\ufffd"),
        (b"a\xe2\x82x\xc3", "a\ufffdx"),
        (b"ab\xff", "ab\ufffd"),  # never the beginning of anything
    ):
        assert text_of(list(tokens), Detokenizer(BYTES), StopScanner(()), last=True) == (text, len(tokens), False)
    stops = StopScanner(["#"])
    assert text_of(list(b"a\xe2\x82#"), Detokenizer(BYTES), stops, last=True)[0] == "a\ufffd"  # not the end


def test_a_stop_string_does_not_count_before_the_least_number_of_tokens() -> None:
    text = b"ab##c##d"
    for least, expected in ((0, "ab"), (3, "ab"), (4, "ab##c"), (6, "ab##c"), (7, "ab##c##d")):
        got, count, stopped = text_of(list(text), Detokenizer(BYTES), StopScanner(["##"], least), last=True)
        assert (got, stopped, count >= least) == (expected, expected != text.decode(), True), least


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
