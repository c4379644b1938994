"""Replace a model's linear layers on a CPU by layers that are packed once for oneDNN.

torch's own float32 linear (MKL) is made for many rows: on one core of a Zen 4, 22M parameters, 1 / 3 / 5 / 8 rows take
8 / 15 / 13 / 13 ms. With packed weights they take 6.5 / 6 / 5.5 / 7.5 ms, and a row's bits do not depend on the rows
beside it, which MKL's do below four. bfloat16 gains as much.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.functional import pad

log = logging.getLogger(__name__)

_HINT_ROWS = 16
"""Rows that the packed layout is made for; the best choice measured from 1 to 128 rows."""
LEAST_ROWS = 4 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 1
"""Fewer rows are padded to these; a step as a whole, so that layers need not pad. With AVX-512 four are computed faster
than one. With AVX2, whose rows have the same bits either way, 1 / 2 / 3 rows of the shipped target take 14.3 / 14.1 /
16.4 ms on one core, and padded 16.9 / 18.2 / 19.0."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Greatest difference of a replacement to torch's own linear layer, relative to its greatest output."""
_PACKABLE = (torch.float32, torch.bfloat16)

# What torch's inductor uses for frozen weights. Not public, so it may be missing; results are checked before use.
_pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


class PackedLinear(nn.Module):
    """Replaces nn.Linear for inference on a CPU; x `[..., in]` -> `[..., out]`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.weight = torch.empty_like(linear.weight, device="meta")
        """Shape and dtype, which some models ask for; it holds no values."""
        self._bias = linear.bias
        self._packed = _pack(linear.weight.detach().contiguous(), _HINT_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if (computed := rows_computed(count)) > count:
            rows = pad(rows, (0, 0, 0, computed - count))
        out: torch.Tensor = _linear(rows, self._packed, self._bias, "none", [], "")
        if computed > count:
            out = out[:count]
        return out.reshape(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def pack_linears(module: nn.Module) -> int:
    """Replace the linear layers that can be packed, each checked against torch's own; returns how many."""
    found = packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if packable(child):
                found += 1
                if (replacement := packed_if_equal(child)) is not None:
                    setattr(parent, name, replacement)
                    packed += 1
    if packed < found:
        log.warning("%d of %d linear layers cannot be packed and stay as they are", found - packed, found)
    return packed


def plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a linear one, and no more than that."""
    # A layer whose forward was replaced, or one with hooks, does more.
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not hooked


def packable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a plain linear one on a CPU, of a dtype that can be packed."""
    known = _pack is not None and _linear is not None
    return plain(layer) and known and layer.weight.dtype in _PACKABLE and layer.weight.device.type == "cpu"


def packed_if_equal(linear: nn.Linear) -> PackedLinear | None:
    """Return the packed layer; None if this processor's oneDNN refuses it or computes something else."""
    try:
        packed = PackedLinear(linear)
        return packed if agree([linear], packed) else None
    except RuntimeError as error:
        log.info("oneDNN does not pack a layer of %s: %s", tuple(linear.weight.shape), error)
        return None


def agree(layers: Sequence[nn.Linear], whole: nn.Module) -> bool:
    """Return whether one module's outputs are those of linear layers, one after another, but for rounding."""
    weight = layers[0].weight
    x = torch.randn(5, layers[0].in_features, generator=torch.Generator().manual_seed(0)).to(weight)
    expected = torch.cat([layer(x) for layer in layers], dim=-1).float()
    difference = (whole(x).float() - expected).abs().max()
    return bool(difference <= _TOLERANCE[weight.dtype] * expected.abs().max())


def rows_computed(rows: int) -> int:
    """Return the number of rows that is computed for so many.

    oneDNN keeps a primitive of 1 to 5 MB for every shape, up to 1,024 shapes: five layers at every number of rows from
    8 to 512 took 4.4 GB, padded 0.3 GB, in the same time.
    """
    if rows <= 16:
        return max(rows, LEAST_ROWS)
    block = 8 if rows <= 64 else 16 if rows <= 256 else 32
    return -(-rows // block) * block
