"""Batched decoding of a Qwen3 model: rows of equal length, one preallocated KV cache, no padding.

transformers repeats every key head per query head and copies the cache at each step; folding the query
heads of a group into rows avoids both, which is most of the cost at this size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM


class Decoder:
    """Decodes ``batch`` sequences of at most ``length`` tokens with the weights of ``model``."""

    def __init__(self, model: Qwen3ForCausalLM, batch: int, length: int) -> None:
        config = model.config
        self._model = model
        self._heads, self._kv_heads, self._dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        dtype, device = model.dtype, model.device
        shape = (config.num_hidden_layers, batch, self._kv_heads, length, self._dim)
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        base = config.rope_parameters["rope_theta"]
        rates = base ** -(torch.arange(0, self._dim, 2, dtype=torch.float32, device=device) / self._dim)
        angles = torch.arange(length, device=device)[:, None] * torch.cat([rates, rates])
        self._cosines, self._sines = angles.cos().to(dtype), angles.sin().to(dtype)
        self._used = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Append ``[batch, n]`` ids and return the logits after the last one, ``[batch, vocab]`` in fp32.

        The first call may bring a prompt of any length; every later one brings a single token.
        """
        states = self._model.model.embed_tokens(ids)
        begin, end = self._used, self._used + ids.shape[1]
        for index, layer in enumerate(self._model.model.layers):
            states = states + self._attention(index, layer.self_attn, layer.input_layernorm(states), begin, end)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        self._used = end
        logits: Tensor = self._model.lm_head(self._model.model.norm(states[:, -1]))
        return logits.float()

    def _attention(self, index: int, attention: Any, states: Tensor, begin: int, end: int) -> Tensor:
        batch, count, _ = states.shape
        split = (batch, count, -1, self._dim)
        query = self._rotate(attention.q_norm(attention.q_proj(states).view(split)).transpose(1, 2), begin, end)
        key = self._rotate(attention.k_norm(attention.k_proj(states).view(split)).transpose(1, 2), begin, end)
        self._keys[index, :, :, begin:end] = key
        self._values[index, :, :, begin:end] = attention.v_proj(states).view(split).transpose(1, 2)
        keys, values = self._keys[index, :, :, :end], self._values[index, :, :, :end]
        if begin == 0:
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            mixed = self._one_row(query, keys, values)
        out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        return out

    def _one_row(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = query.shape[0]
        rows = query.view(batch, self._kv_heads, self._heads // self._kv_heads, self._dim)
        weights = (rows @ keys.transpose(2, 3)).float() * self._dim**-0.5
        mixed: Tensor = weights.softmax(-1).to(values.dtype) @ values
        return mixed.view(batch, self._heads, 1, self._dim)

    def _rotate(self, heads: Tensor, begin: int, end: int) -> Tensor:
        left, right = heads.chunk(2, dim=-1)
        turned = torch.cat([-right, left], dim=-1)
        return heads * self._cosines[begin:end] + turned * self._sines[begin:end]
