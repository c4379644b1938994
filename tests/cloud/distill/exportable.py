"""Provide tiny random models of every architecture that can be exported, with a tokenizer that llama.cpp knows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from cloud_verifier.distill.gguf.writer import QWEN2_SPLIT

WORDS = ["the cat sat on the mat", "def run(self): return 12 + 34", "Question: how many? Answer: 42", "naïve café 日本"]
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
WIDTH = 320
"""Rows of the embeddings: some more than there are tokens, as models pad them."""
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE, vocab_size=WIDTH, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**SHAPE, vocab_size=WIDTH, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, vocab_size=WIDTH, head_dim=96, tie_word_embeddings=True),
}


def save_tokenizer(folder: Path, *, pattern: str = QWEN2_SPLIT, size: int = 300) -> Path:
    """Save a byte-level BPE as in a target's folder."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken("<|end|>", special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def make_model(kind: str, **changes: Any) -> Any:
    """Make a random model whose norms and biases differ from their initial values, so that a lost one shows."""
    config = copy.deepcopy(CONFIGS[kind])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(sum(kind.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(2.0)
    return model.eval()


def save_model(kind: str, folder: Path, **changes: Any) -> Path:
    make_model(kind, **changes).save_pretrained(folder)
    return folder


def logits_of(model: Any, ids: list[int]) -> NDArray[np.float32]:
    """Return the logits that transformers computes after every token, `[n, V]`."""
    with torch.inference_mode():
        rows: NDArray[np.float32] = model(torch.tensor([ids])).logits[0].float().numpy()
    return rows
