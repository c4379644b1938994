"""Test that a tokenizer file's settings beyond the vocabulary do no harm on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import ModelRefused

TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"
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


def test_an_interrupt_is_not_taken_for_a_broken_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    class Interrupted:
        @staticmethod
        def from_buffer(data: bytes) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "Tokenizer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        TargetTokenizer(TOKENIZER.read_bytes())
