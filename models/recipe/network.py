"""The models' architecture and initial weights, and their loss on plain text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from models.recipe.settings import SPECIAL_TOKENS, VOCAB_SIZE, ModelShape

_LOGIT_ROWS = {"cpu": 512, "cuda": 16_384}
"""Rows of logits at a time. On a CPU malloc maps and unmaps a larger matrix at every use."""
_TRAINING_ATTENTION = "folded_causal"


def new_model(shape: ModelShape, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained model. Output projections start at zero: every block begins as the identity."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config_of(shape))
    use_training_attention(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return model


def use_training_attention(model: Qwen3ForCausalLM) -> None:
    """Switch a model to the kernel for whole, unpadded sequences; nothing of it is saved with the model."""
    AttentionInterface.register(_TRAINING_ATTENTION, _folded_causal)
    model.set_attn_implementation(_TRAINING_ATTENTION)


def _folded_causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend causally: ``query [B, heads, T, d]``, ``key [B, kv_heads, T, d]`` -> ``[B, T, heads, d]``.

    Sequences have no padding. On a CPU it is about twice as fast as the fused kernel at these lengths. The query heads
    that share a key head are folded into rows, so no key is repeated.
    """
    if query.is_cuda:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2), None
    batch, heads, length, width = query.shape
    groups = batch * key.shape[1]
    repeat = heads // key.shape[1]
    rows = query.reshape(groups, repeat * length, width)
    keys, values = key.reshape(groups, length, width), value.reshape(groups, length, width)
    hidden = _future(length, repeat, query.dtype).expand(groups, -1, -1)
    weights = torch.baddbmm(hidden, rows, keys.transpose(1, 2), alpha=scaling).softmax(-1).to(values.dtype)
    return (weights @ values).view(batch, heads, length, width).transpose(1, 2), None


@lru_cache(maxsize=4)
def _future(length: int, repeat: int, dtype: torch.dtype) -> Tensor:
    mask = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
    return mask.repeat(repeat, 1)


def config_of(shape: ModelShape) -> Qwen3Config:
    """Return the transformers configuration; ids 0 and 1 are ``<|end|>`` and ``<|pad|>``."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|pad|>"),
    )


def hidden_states(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """Return the final normalised states, ``[batch, length, hidden]``."""
    states: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def pieces(tensor: Tensor, rows: int) -> list[Tensor]:
    """Cut a tensor along its first axis into views of at most ``rows`` rows."""
    return [tensor[start : start + rows] for start in range(0, len(tensor), rows)]


def text_loss(model: Qwen3ForCausalLM, windows: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of ``windows[:, 1:]``, in nats per token."""
    answers = windows[:, 1:].flatten()
    device, rows = windows.device.type, _LOGIT_ROWS[windows.device.type]
    total = torch.zeros((), device=device)
    with torch.autocast(device, torch.bfloat16):
        states = hidden_states(model, windows[:, :-1]).flatten(0, 1)
        for some, right in zip(pieces(states, rows), pieces(answers, rows), strict=True):
            total = total + F.cross_entropy(model.lm_head(some).float(), right, reduction="sum")
    return total / len(answers)


def optimizers_for(model: nn.Module, muon_rate: float, adam_rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings and norms, with ``peak`` rates set."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    both: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=muon_rate, weight_decay=decay, momentum=0.95, nesterov=True),
        torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return both
