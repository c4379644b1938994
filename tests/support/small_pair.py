"""Name the files of the small pair of models that tests use; tests/pair/README.md says what they are."""

from __future__ import annotations

from pathlib import Path

PAIR = Path(__file__).resolve().parents[1] / "pair"
TARGET, DRAFT, NARROW = PAIR / "target", PAIR / "draft.gguf", PAIR / "draft-narrow.gguf"
HEADS = PAIR / "heads.safetensors"
TOKENIZER = TARGET / "tokenizer.json"
