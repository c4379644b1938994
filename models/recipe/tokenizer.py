"""A byte-level BPE of 8,192 tokens that transformers and llama.cpp split in exactly the same way."""

from __future__ import annotations

import json
from typing import cast

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cloud_verifier.distill.gguf.writer import QWEN2_SPLIT
from models.recipe import corpus
from models.recipe.settings import END, PAD, SPECIAL_TOKENS, VOCAB_SIZE, Job

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a role is system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(job: Job) -> None:
    """Train the tokenizer unless there is one, save it for transformers, and store every document's tokens."""
    documents = corpus.load(job)
    folder = job.stage("tokenizer")
    if (folder / "tokenizer.json").exists():  # that of a target which was taken over
        tokenizer = load(job)
    else:
        texts = [_without_specials(item.text) for item in documents if item.split == "train" and item.kind != "tests"]
        tokenizer = train(texts)
        wrap(tokenizer).save_pretrained(folder)
    counts = _store_tokens(job, tokenizer, documents)
    (folder / "done.json").write_text(json.dumps({"tokens": counts}, indent=1), encoding="utf-8")


def train(texts: list[str]) -> Tokenizer:
    """Return a BPE of exactly ``VOCAB_SIZE`` tokens whose first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that sums line up. No normaliser: llama.cpp has none.
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: more text is needed"
        )
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer as transformers knows it: no BOS, ``<|end|>`` as EOS, with the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return cast(PreTrainedTokenizerFast, wrapped)


def load(job: Job) -> Tokenizer:
    """Return the trained tokenizer."""
    return Tokenizer.from_file(str(job.stage("tokenizer") / "tokenizer.json"))


def _store_tokens(job: Job, tokenizer: Tokenizer, documents: list[corpus.Document]) -> dict[str, int]:
    folder = job.stage("tokens")
    counts: dict[str, int] = {}
    for kind, split in sorted({(item.kind, item.split) for item in documents}):
        texts = [item.text for item in documents if (item.kind, item.split) == (kind, split)]
        rows = [row.ids for row in tokenizer.encode_batch(texts, add_special_tokens=False)]
        name = f"{kind}-{split}"
        np.save(folder / f"{name}.npy", np.concatenate([np.array(row, np.uint16) for row in rows]))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(row) for row in rows]))
        counts[name] = sum(len(row) for row in rows)
    return counts


def _without_specials(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text
