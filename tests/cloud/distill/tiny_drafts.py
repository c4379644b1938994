"""Provide tiny random drafts with a tokenizer of their own, and traffic for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from cloud_verifier.distill.texts import Text, save_texts
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.traffic.passage import Passage

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("e", "r")]
VOCAB = 256 + len(MERGES) + 1
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": None,
}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "qwen2": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    # Heads wider than hidden size by number of heads, as the real Qwen3 has them.
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True, rope_theta=5e5),
    "qwen3-untied": transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
}
TOP = 8


def tiny_tokenizer(pattern: str = r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+") -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def tiny_draft(kind: str, **changes: Any) -> Any:
    """Return a random model, whose norms and biases are random too, so that a lost one shows."""
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[kind])
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(3.0)
    return model.eval()


def random_text(rng: np.random.Generator, count: int, *, name: str = "code", first: int = 1, top: int = TOP) -> Text:
    """Return a text whose target strongly prefers the tokens that follow."""
    # A walk by fixed steps over few tokens: easy to learn from one token to the next.
    tokens = ((7 * np.arange(count) + int(rng.integers(40))) % 40).astype(np.int32)
    ids = np.stack([rng.permutation(VOCAB - 1)[:top] for _ in range(count)]).astype(np.int32)
    for row, token in zip(ids, tokens, strict=True):
        row[row == token] = row[0]
        row[0] = token
    weights = np.concatenate([np.full((count, 1), 60.0), rng.random((count, top))], axis=1)
    p = weights / weights.sum(1, keepdims=True)
    return Text(name, tokens, ids, np.log(p[:, :top]).astype(np.float32), p[:, top].astype(np.float32), first)


def tiny_dataset(folder: Path, *, texts: int = 24, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    some = [random_text(rng, int(rng.integers(6, 30)), name=("code", "prose")[i % 2]) for i in range(texts)]
    save_texts(folder / "train", some[6:])
    save_texts(folder / "validation", some[:6])
    save_texts(folder / "heldout", some[:6])
    return folder


def tiny_base(folder: Path, kind: str = "qwen3") -> Path:
    tiny_draft(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_plan(root: Path, **changes: Any) -> TrainingPlan:
    """Return a plan over a base and a dataset in `root`, made on the first call."""
    base = root / "base" if (root / "base").exists() else tiny_base(root / "base")
    data = root / "data" if (root / "data").exists() else tiny_dataset(root / "data")
    settings: dict[str, Any] = {
        "steps": 12,
        "batch_tokens": 96,
        "micro_tokens": 64,
        "measure_steps": 4,
        "precision": "float32",
        "learning_rate": 3e-3,
        "train_embeddings": True,  # of a random model the embeddings are as new as all else
        "base_share": 0.0,
        "warmup_steps": 2,
    }
    return TrainingPlan(**({"base": base, "tokenizer": base, "dataset": data} | settings | changes))


def passage(session: str, start: int, tokens: Sequence[int], **changes: Any) -> Passage:
    count = len(tokens)
    top = changes.pop("top", TOP)
    rng = np.random.default_rng([start, count])
    log_probs = np.log(np.sort(rng.dirichlet(np.ones(top + 1), count), axis=1)[:, ::-1])
    fields: dict[str, Any] = {
        "session_id": session,
        "tenant": "",
        "traffic_class": "code",
        "draft_release": "",
        "weights_hash": "target",
        "start": start,
        "tokens": np.array(tokens, np.int32),
        "top_ids": rng.integers(0, VOCAB, (count, top)).astype(np.int32),
        "top_log_probs": log_probs[:, :top].astype(np.float32),
        "tail": np.exp(log_probs[:, top:]).sum(1).astype(np.float32),
        "proposed_depths": np.zeros(count, np.uint8),
        "temperature": 0.0,
        "time_unix": 100.0,
        "expires_unix": 1e9,
    }
    return Passage(**(fields | changes))


class ListedLog:
    """Hold a traffic log in memory. Passages come in any order, as they do from the files of several verifiers."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]:
        for one in self.passages:
            if one.time_unix >= since_unix and (now is None or one.expires_unix > now):
                yield one
