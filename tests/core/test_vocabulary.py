"""Test that token tables of draft and target must name the same tokens."""

from __future__ import annotations

import hashlib

import pytest

from outrider.core.errors import VocabularyMismatch
from outrider.core.vocabulary import compare_token_tables, vocabulary_hash


def test_a_mismatch_names_the_first_ids_that_differ_and_how_many_do() -> None:
    draft = [b"x%d" % i for i in range(10)]
    target = [b"x0", *(b"y%d" % i for i in range(1, 12))]
    with pytest.raises(VocabularyMismatch) as mismatch:
        compare_token_tables(draft, target)
    message = str(mismatch.value)
    assert "9 of the 10" in message
    assert "id 1: b'x1' and b'y1'" in message and "id 4" not in message
    assert "the draft has 10 ids, the target 12" in message
    assert mismatch.value.field == "token_table"


def test_special_tokens_may_differ_and_are_named_as_never_to_be_drafted(caplog: pytest.LogCaptureFixture) -> None:
    draft = [b"a", b"<|im_end|>", b"<|reserved_0|>", b"", b"<think>"]
    target = [b"a", b"<|im_end|>", b"<|tool|>", b"x", b"<thought>", b"more"]
    with caplog.at_level("INFO"):
        assert compare_token_tables(draft, target, special={1, 2, 4}) == (5, [2, 3, 4])
    assert len(caplog.records) == 1 and "id 2: b'<|reserved_0|>' and b'<|tool|>'" in caplog.text
    with pytest.raises(VocabularyMismatch, match=r"differ in 1 of the 5 ids .* beside special tokens"):
        compare_token_tables(draft, target, special={1, 2})
    with pytest.raises(VocabularyMismatch):  # nothing is left to draft
        compare_token_tables([b"<a>"], [b"<b>"], special={0})


def test_the_hash_is_that_of_its_published_layout() -> None:
    layout = b"\x01\0\0\0a" + b"\x02\0\0\0bc" + b"\0\0\0\0"
    assert vocabulary_hash([b"a", b"bc", b""]) == hashlib.sha256(layout).digest()
