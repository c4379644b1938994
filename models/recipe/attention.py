"""Causal attention for training on a CPU, about twice as fast there as the fused kernel at these lengths.

The query heads that share a key head are folded into rows, so no key is repeated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "folded_causal"


def folded_causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend from position 0 on: ``query [B, heads, T, d]``, ``key [B, kv_heads, T, d]`` -> ``[B, T, heads, d]``."""
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


def register() -> None:
    """Make the kernel known to transformers under ``NAME``; it must see whole sequences, without padding."""
    AttentionInterface.register(NAME, folded_causal)
