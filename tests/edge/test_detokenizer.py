"""Test text as it is delivered: whole characters, silent special tokens, stop strings cut wherever they fall."""

from __future__ import annotations

import random

import pytest

from edge_agent.sdk.request import Request
from edge_agent.target.detokenizer import Detokenizer, StopScanner, TextAssembler
from outrider.core.errors import BadRequest

BYTES = [bytes([i]) for i in range(256)]


def test_a_character_split_over_tokens_comes_whole() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.feed(byte) for byte in "é€🙂".encode()] == ["", "é", "", "", "€", "", "", "", "🙂"]


def test_bytes_that_are_no_utf8_become_replacement_characters_and_stay_so() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.feed(0xFF) == "�"
    assert detokenizer.feed(0xE2) == ""
    assert detokenizer.feed(ord("a")) == "�a"


def test_what_is_unfinished_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.feed(0xE2) == ""
    assert detokenizer.flush() == "�"


def test_special_and_unknown_ids_are_no_text() -> None:
    detokenizer = Detokenizer([b"a", b"<|end|>"], special={1})
    assert [detokenizer.feed(token) for token in (0, 1, 7)] == ["a", "", ""]


def test_text_in_pieces_is_the_text_as_a_whole_whatever_the_chunks() -> None:
    text = "naïve 日本語 🙂🏽 \r\n\t end"
    rng = random.Random(5)
    for _ in range(200):
        assembler, tokens, out = TextAssembler(BYTES, (), ()), list(text.encode()), ""
        while tokens:
            size = rng.randint(1, 5)
            chunk, tokens = tokens[:size], tokens[size:]
            out += assembler.feed(chunk, last=not tokens)[0]
            assert text.startswith(out)
        assert out == text


def test_a_stop_string_ends_the_text_before_it_and_hides_what_follows() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("abc END def") == "abc "
    assert scanner.hit and scanner.feed("more") == "" and scanner.flush() == ""


def test_a_stop_string_in_pieces_is_found() -> None:
    scanner = StopScanner(["\n\n"])
    assert scanner.feed("a\n") == "a"
    assert scanner.feed("\nb") == ""
    assert scanner.hit


def test_what_only_began_like_a_stop_string_is_given_back() -> None:
    scanner = StopScanner(["</s>", "</so>"])
    assert scanner.feed("x</s") == "x"
    assert scanner.feed("ofa>") == "</sofa>"
    assert not scanner.hit
    assert scanner.feed("</") == "" and scanner.flush() == "</"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    scanner = StopScanner(["cd", "bcd"])
    assert scanner.feed("abcd") == "a"


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
    assembler = TextAssembler(BYTES, (), ["##"])
    assert assembler.feed(list(b"ab#"), last=False) == ("ab", 3, False)
    assert assembler.feed(list(b"#xyz"), last=False) == ("", 1, True)


def test_the_end_of_the_sequence_gives_back_what_was_held() -> None:
    assembler = TextAssembler(BYTES, (), ["##"])
    assert assembler.feed(list(b"ab#"), last=True) == ("ab#", 3, False)


@pytest.mark.parametrize("stop", ["", ["a"] * 17, "x" * 257, [""]])
def test_stop_strings_out_of_bounds_are_refused(stop: str | list[str]) -> None:
    with pytest.raises(BadRequest, match="stop") as caught:
        Request.of(stop=stop)
    assert caught.value.field == "stop"
