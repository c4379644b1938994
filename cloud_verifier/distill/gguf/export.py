"""Export a trained Hugging Face draft as the file that devices load: GGUF, quantized, and checked.

The checks show that the file's vocabulary is the target's, and that llama.cpp splits text as the target's tokenizer
does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from cloud_verifier.distill.config import Embeddings, Quantization
from cloud_verifier.distill.errors import GgufError
from cloud_verifier.distill.gguf.writer import tensor_types, write_gguf
from outrider.artifacts import atomic_files
from outrider.core.errors import ModelRefused, VocabularyMismatch
from outrider.core.vocabulary import compare_token_tables, token_table
from outrider.llama import LlamaModel
from outrider.llama.model import quantize

PROBES = 2_000
"""Number of random strings that tokenizer and llama.cpp must split alike."""
# Tokenizers disagree on contractions, digits, all sorts of spaces, marks, emoji, code, special tokens spelt out.
_AWKWARD = (
    *("I'll", "THEY'RE", "isn't", "o'clock", "'s", "9,876.5", "0x1F", "⅔", "٤٢", "v2beta", "1st", "1234567"),
    *(" ", "   ", "\t\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2003", "\u200d", "        "),
    *("if x:", "__name__", "->", "===", "##", "'''", "\\t", "[]()", "/*", "…", "–", "£7", "a.b.c", "snake_case"),
    *("ü", "u\u0308", "œuvre", "größer", "漢字かな", "조선말", "Жизнь", "שלום", "🚀", "👨‍👩‍👦", "\U0001f1eb\U0001f1f7"),
    *("<s>", "</s>", "<|im_end|>", "<|end", "Hello", "Answer:", "HTTPServer", "!"),
)


@dataclass(frozen=True)
class ExportedDraft:
    """A file that has passed all checks."""

    path: Path
    size: int
    """Bytes."""
    types: Mapping[str, int]
    """Number of tensors by storage type."""
    probes: int
    """Number of strings that llama.cpp and the tokenizer split alike."""

    def __str__(self) -> str:
        types = ", ".join(f"{count} {name}" for name, count in sorted(self.types.items()))
        return f"{self.path}: {self.size} bytes, {types}; {self.probes} strings split as by the tokenizer"


def export(
    model_folder: Path,
    tokenizer_folder: Path,
    out: Path,
    quantization: Quantization = "Q8_0",
    *,
    embeddings: Embeddings | None = None,
    threads: int = 1,
) -> ExportedDraft:
    """Write a draft for the target whose tokenizer is in `tokenizer_folder`; `out` appears once all checks passed.

    embeddings: type of the embeddings and the output layer, which are most of a small draft; None leaves the choice to
    llama.cpp, which takes a wide one.
    Raises GgufError for a model or tokenizer that cannot be exported, or for a file that fails a check.
    """
    tokenizer_json = tokenizer_folder / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise GgufError(f"{tokenizer_folder} has no tokenizer.json: give the target's folder")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder, local_files_only=True)
    full = out.with_name(out.name + ".f32")
    try:
        with atomic_files.replacing(out) as unchecked:
            write_gguf(load_model(model_folder), tokenizer, full, name=f"draft-{model_folder.parent.name}")
            if quantization == "F32":
                full.rename(unchecked)
            else:
                quantize(full, unchecked, quantization, threads, embeddings=embeddings)
            with LlamaModel.load(unchecked) as model:
                probes = check_tokenizer(model, tokenizer_json.read_text(encoding="utf-8"))
            types = Counter(tensor_types(unchecked).values())
    except ModelRefused as error:
        raise GgufError(f"llama.cpp does not take what was exported: {error}") from error
    finally:
        full.unlink(missing_ok=True)
    return ExportedDraft(out, out.stat().st_size, dict(types), probes)


def load_model(folder: Path) -> PreTrainedModel:
    """Load the causal LM in a folder, in float32. Raises GgufError."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise GgufError(f"{folder} holds no causal LM that transformers can load: {error}") from error
    return cast(PreTrainedModel, model.eval())


def check_tokenizer(model: LlamaModel, tokenizer_json: str, probes: Sequence[str] | None = None) -> int:
    """Compare a draft with the target's tokenizer.json: same ids, and same splits of `probes`.

    probes: strings to split; `PROBES` random ones if None. Returns their number. Raises GgufError for a difference.
    """
    try:
        compare_token_tables(model.token_table(), token_table(tokenizer_json))
    except VocabularyMismatch as error:
        raise GgufError(str(error)) from error
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True  # text from users: a special token spelt out is plain text
    texts = list(_random_probes(tokenizer)) if probes is None else probes
    for text in texts:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, model.tokenize(text)
        if ours != theirs:
            raise GgufError(f"llama.cpp splits {text!r:.80} into {theirs[:12]}, the tokenizer into {ours[:12]}")
    return len(texts)


def _random_probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield strings made of awkward pieces, and of random tokens of the vocabulary."""
    chance, ids = random.Random(0), range(tokenizer.get_vocab_size())
    for i in range(PROBES):
        length = chance.randint(1, 16)
        if i % 2:
            yield "".join(chance.choices(_AWKWARD, k=length))
        else:
            yield tokenizer.decode(chance.choices(ids, k=length), skip_special_tokens=False)
