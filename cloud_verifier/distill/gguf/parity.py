"""Proof that a GGUF file means the same text by the same ids as the target's tokenizer, and splits text as it does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from cloud_verifier.distill.gguf.exporter import ExportError
from outrider.core.errors import VocabularyMismatch
from outrider.core.tokenizer_json import token_table
from outrider.core.vocabulary import compare_token_tables
from outrider.llama import LlamaModel

PROBES = 2_000
# What tokenizers disagree on: contractions, digits, spaces of all sorts, marks, emoji, code, special tokens spelt out.
_AWKWARD = (
    *("I'll", "THEY'RE", "isn't", "o'clock", "'s", "9,876.5", "0x1F", "⅔", "٤٢", "v2beta", "1st", "1234567"),
    *(" ", "   ", "\t\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2003", "\u200d", "        "),
    *("if x:", "__name__", "->", "===", "##", "'''", "\\t", "[]()", "/*", "…", "–", "£7", "a.b.c", "snake_case"),
    *("ü", "u\u0308", "œuvre", "größer", "漢字かな", "조선말", "Жизнь", "שלום", "🚀", "👨‍👩‍👦", "\U0001f1eb\U0001f1f7"),
    *("<s>", "</s>", "<|im_end|>", "<|end", "Hello", "Answer:", "HTTPServer", "!"),
)


def check(model: LlamaModel, tokenizer_json: str, probes: Sequence[str] | None = None) -> int:
    """Compare a draft with the target's tokenizer.json; returns how many strings were split alike.

    probes: of the caller; `PROBES` random ones where None. Raises ExportError for the first difference.
    """
    try:
        compare_token_tables(model.token_table(), token_table(tokenizer_json))
    except VocabularyMismatch as error:
        raise ExportError(str(error)) from error
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True  # text from users: a special token spelt out is plain text
    texts = list(random_probes(tokenizer)) if probes is None else probes
    for text in texts:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, model.tokenize(text)
        if ours != theirs:
            raise ExportError(f"llama.cpp splits {text!r:.80} into {theirs[:12]}, the tokenizer into {ours[:12]}")
    return len(texts)


def random_probes(tokenizer: Tokenizer, count: int = PROBES, seed: int = 0) -> Iterator[str]:
    """Strings put together from awkward pieces, and from random tokens of the vocabulary."""
    chance = random.Random(seed)
    size = tokenizer.get_vocab_size()
    for i in range(count):
        length = chance.randint(1, 16)
        if i % 2:
            yield "".join(chance.choices(_AWKWARD, k=length))
        else:
            yield tokenizer.decode([chance.randrange(size) for _ in range(length)], skip_special_tokens=False)
