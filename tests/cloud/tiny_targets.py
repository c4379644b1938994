"""Make tiny random target models, and compute their output with plain transformers."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filtered import filtered_log_probs

from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.processors import TokenCounts, penalise
from outrider.core.sampling import SamplingParams

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCAB = 101
EOS = 7
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
TINY: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=11),
    "gemma2": transformers.Gemma2Config(
        **SHAPE, head_dim=12, sliding_window=9, attn_logit_softcapping=5.0, query_pre_attn_scalar=12
    ),
    "gpt_neox": transformers.GPTNeoXConfig(
        **{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
        rotary_pct=0.5,
        use_parallel_residual=True,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SHAPE, head_dim=16, sliding_window=9, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=4, n_positions=256, vocab_size=VOCAB, bos_token_id=1, eos_token_id=EOS
    ),
}


def make_tiny(kind: str) -> Any:
    # A copy: the module keeps its configuration, and a target changes the attention in it.
    return random_module(copy.deepcopy(TINY[kind]), kind)


def random_module(config: transformers.PretrainedConfig, seed: str) -> Any:
    """Make a random model with sharper logits than the default initialisation gives."""
    torch.manual_seed(sum(seed.encode()))
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return module.eval()


def save_tiny(kind: str, directory: Path) -> Path:
    make_tiny(kind).save_pretrained(directory)
    return directory


class Reference:
    """Run plain transformers: one forward pass per token over a DynamicCache, no tree, no batch."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        params: SamplingParams | None = None,
        *,
        ignore_eos: bool = False,
        stop: tuple[int, ...] = (),
    ) -> list[int]:
        """Return the sequence that the target generates without a draft."""
        params = params or SamplingParams()
        cache = transformers.DynamicCache(config=self.module.config)
        out: list[int] = []
        ids = prompt
        while len(out) < max_tokens:
            logits = self.module(torch.tensor([ids]), past_key_values=cache).logits[0, -1].numpy()
            token = self._choose(logits, params, prompt, out)
            out.append(token)
            ids = [token]
            if token in stop or (token == EOS and not ignore_eos):
                break
        return out

    def _choose(self, logits: np.ndarray, params: SamplingParams, prompt: list[int], out: list[int]) -> int:
        scores = penalise(logits.astype(np.float64), params, TokenCounts(prompt, out))
        if not params.greedy:
            key = position_key(session_key(params.seed, prompt), len(out))
            scores = filtered_log_probs(scores, params) + gumbel(key, np.arange(len(scores)))
        return int(np.argmax(scores))
