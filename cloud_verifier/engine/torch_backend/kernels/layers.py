"""Compute a decoder layer that is built as Llama's in one function, on a CPU.

Where rows are few, transformers' modules and small operators take a third of a step. On one core of a Zen 4,
SmolLM2-135M takes 41.3 / 46.3 / 96.7 ms for 1 / 4 / 16 rows in float32 by its modules, and 37.7 / 42.6 / 92.1 ms so; in
bfloat16, with the parallel products joined as well, 32.2 / 36.6 / 71.2 and 27.3 / 31.7 / 67.2 ms. A layer is compared
with its modules first, and keeps them if it differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from cloud_verifier.engine.torch_backend.kernels.attention import Scoring, running
from cloud_verifier.engine.torch_backend.kernels.fusion import ParallelLinear
from cloud_verifier.engine.torch_backend.kernels.linear import PackedLinear
from cloud_verifier.engine.torch_backend.kv_pool import KVPool

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Greatest difference of a row's output to the modules' own, by norms: twice what the layers of SmolLM2 show in
bfloat16, and twenty times in float32."""


class _Rotation:
    """Prepares a step's rotary positions, which all layers share."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] = (None, torch.empty(0), torch.empty(0))

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors `[T, 1, D]` of a head's vector, and of the vector with its halves exchanged."""
        if self._last[0] is not sin:
            first, second = sin[0].unsqueeze(1).chunk(2, dim=-1)
            self._last = sin, cos[0].unsqueeze(1), torch.cat([-first, second], dim=-1)
        return self._last[1:]


class _Layer:
    """Stands for a decoder layer's forward; a pass without a plan, which serves as a reference, goes to its modules."""

    def __init__(self, layer: Any, rotation: _Rotation, index: int, scoring: Scoring) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._by_modules: Callable[..., torch.Tensor] = layer.forward
        self._rotation, self._index, self._scoring = rotation, index, scoring
        self._width = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._width
        self._rotated = self._heads + attention.k_proj.out_features // self._width
        self._norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        # Called without what a module's call does besides, which takes as long as a small operator.
        self._qkv, self._gate_up = attention.q_proj.joint.whole.forward, mlp.gate_proj.joint.whole.forward
        self._out, self._down, self._activation = attention.o_proj.forward, mlp.down_proj.forward, mlp.act_fn

    def __call__(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Return the layer's output `[1, T, H]`."""
        plan = running.get(None)
        embeddings = keywords["position_embeddings"]
        if plan is None or embeddings[0].shape[-1] != self._width:  # or a part of a head alone is rotated
            return self._by_modules(hidden_states, **keywords)
        x, heads, rotated = hidden_states[0], self._heads, self._rotated
        cos, sin = self._rotation.of(*embeddings)
        qkv = self._qkv(rms_norm(x, *self._norms[0])).view(len(x), -1, self._width)
        qk = qkv[:, :rotated]
        qk = torch.addcmul(qk * cos, qk.roll(self._width // 2, -1), sin).transpose(0, 1)[None]
        value = qkv[:, rotated:].transpose(0, 1)[None]
        attended = plan.attend(self._index, qk[:, :heads], qk[:, heads:], value, self._scoring)
        x = x + self._out(attended.reshape(len(x), -1))
        gate, up = self._gate_up(rms_norm(x, *self._norms[1])).chunk(2, dim=-1)
        out: torch.Tensor = (x + self._down(self._activation(gate) * up))[None]
        return out


class _Mixing:
    """An attention plan that mixes a row's own query, key and value, so that each shows in the result."""

    def __init__(self) -> None:
        self.pool = KVPool((), 0, dtype=torch.float32)
        self.asked: list[tuple[int, Scoring]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.asked.append((layer, scoring))
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        return (query * key + value).transpose(1, 2)


@torch.inference_mode()
def fuse_layers(module: nn.Module) -> int:
    """Replace the forward of layers whose products are joined and packed; return the number of those replaced."""
    rotation = _Rotation()
    return sum(_fuse_layer(layer, rotation) for layer in module.modules())


def _fuse_layer(layer: Any, rotation: _Rotation) -> int:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    joined = getattr(attention, "v_proj", None), getattr(mlp, "up_proj", None)
    packed = getattr(attention, "o_proj", None), getattr(mlp, "down_proj", None)
    if not all(isinstance(one, ParallelLinear) for one in joined):
        return 0
    if not all(isinstance(one, PackedLinear) for one in packed):
        return 0
    plan = _Mixing()
    token = running.set(plan)
    try:
        width, like = attention.head_dim, attention.o_proj
        x, cos, sin = (_random(seed, n).to(like.dtype) for seed, n in enumerate((like.out_features, width, width)))
        x *= 0.01  # so that what the layer adds to it is most of the output
        expected = layer(x, attention_mask=None, position_embeddings=(cos, sin), use_cache=False)
        ((index, scoring),) = plan.asked
        fused = _Layer(layer, rotation, index, scoring)
        got = fused(x, position_embeddings=(cos, sin))
        difference, size = (each.float().norm(dim=-1) for each in (got - expected, expected))
    except Exception:  # it is built otherwise
        return 0
    finally:
        running.reset(token)
    if not bool((difference <= _TOLERANCE[x.dtype] * size).all()):  # also if one is not a number
        return 0
    layer.forward = fused
    return 1


def _norm(norm: Any) -> tuple[tuple[int], torch.Tensor, float]:
    """Return what torch's function wants to know of an RMS norm."""
    return (len(norm.weight),), norm.weight, getattr(norm, "variance_epsilon", None) or norm.eps


def _random(seed: int, width: int) -> torch.Tensor:
    return torch.randn(1, 5, width, generator=torch.Generator().manual_seed(seed))
