"""Compute linear layers for a fixed number of rows at a time, so that a row's bits do not depend on their number.

A library chooses its kernel by the shape: on a CPU with AMX, oneDNN uses another one in bfloat16 from 33 rows on,
with other bits. With `exact` attention every product of a layer has TILE rows, however many the step has.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

from cloud_verifier.engine.kernels.packed_linear import PackedLinear

TILE = 16
"""Number of rows in one product; exact attention pads steps to a multiple of it. The shipped target in bfloat16 on one
core, a step of 1 / 64 / 512 rows in ms: with AMX 10.4 / 23 / 229, in tiles of 32 11.6 / 20 / 206, whole 10.4 / 16 /
162; with AVX-512 alone 18 / 46 / 506, in tiles of 32 25 / 43 / 482, whole 18 / 39 / 444."""


class TiledLinear(nn.Module):
    """Compute a layer in tiles of TILE rows; x `[..., in]` -> `[..., out]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if missing := -count % TILE:
            rows = pad(rows, (0, 0, 0, missing))
        out = self.layer(rows) if count <= TILE else torch.cat([self.layer(tile) for tile in torch.split(rows, TILE)])
        return out[:count].reshape(*x.shape[:-1], out.shape[-1])


def tile_linears(module: nn.Module, *others: type[nn.Module]) -> int:
    """Wrap linear layers, and layers of type `others`, whose bits may depend on the number of rows; returns how many.

    Packed float32 layers are left as they are: oneDNN gives a row the same bits up to 1,024 rows, with AVX2 and with
    AVX-512, and in tiles the shipped target's step of 512 rows would take 1.3 times as long, one of 64 rows 1.4 times.
    """
    found = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, TiledLinear)
        for name, child in parent.named_children()
        if isinstance(child, (nn.Linear, PackedLinear, *others)) and not _is_packed_float32(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, TiledLinear(child))
    return len(found)


def _is_packed_float32(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLinear) and layer.dtype == torch.float32
