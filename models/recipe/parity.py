"""Proof that llama.cpp and transformers see the same tokens in a GGUF file and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from outrider.llama.model import LlamaModel

# What tokenizers disagree on: contractions, digits, spaces of all sorts, marks, emoji, special tokens spelt out.
_PIECES = (
    *("I'm", "WE'LL", "it's", "don't", "x'y", "'re", "12,345.67", "007", "½", "٣", "x1y2", "3rd"),
    *(" ", "  ", "\t", "\n", "\r\n", "\n\n  ", " \n", "\u00a0", "\u3000", "\u200b", "    "),
    *("def f(x):", "self.__init__", "a->b", "!=", "###", '"""', "\\n", "{}", "//", "...", "—", "€5"),
    *("é", "e\u0301", "ñandú", "Straße", "日本語", "한국어", "Привет", "مرحبا", "🙂", "👩‍👩‍👧", "\U0001f1e9\U0001f1ea"),
    *("<|end|>", "<|user|>", "<|assistant|", "the", "Question:", "_", "CamelCase", "UPPER"),
)


def count_mismatches(gguf: Path, tokenizer: Tokenizer, texts: list[str]) -> int:
    """Return for how many texts the two disagree. Raises ValueError if their token tables differ."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True  # text from users: a special token spelt out is plain text
    with LlamaModel.load(gguf) as model:
        for index, spelled in enumerate(model.token_table()):
            ours = tokenizer.decode([index], skip_special_tokens=False)
            if "\ufffd" not in ours and ours.encode() != spelled:
                raise ValueError(f"token {index} is {spelled!r} in {gguf.name}, {ours!r} in the tokenizer")
        return sum(model.tokenize(text) != tokenizer.encode(text, add_special_tokens=False).ids for text in texts)


def probe_texts(documents: list[str], count: int, seed: int) -> list[str]:
    """Return ``count`` strings: half cut from documents, half put together from awkward pieces."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count // 2):
        document = documents[rng.integers(len(documents))]
        start = int(rng.integers(len(document)))
        texts.append(document[start : start + int(rng.integers(1, 400))])
        texts.append("".join(rng.choice(_PIECES, int(rng.integers(1, 20)))))
    return texts
