"""Linear layers always computed for the same number of rows: a row's bits cannot depend on how many there are.

A library chooses its kernel by the shape: on a CPU with AMX, oneDNN takes another one in bfloat16 from 33 rows on,
with other bits. With `exact` attention every product of a layer has TILE rows, however many the step has.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

from cloud_verifier.engine.packed_linear import PackedLinear

TILE = 32
"""Rows of one product. A step of the shipped target in bfloat16, on one core with AMX: 11.6 ms for one row, 206 ms for
512; in tiles of 16 10.4 and 229 ms, of 64 12.2 and 202 ms, whole 10.4 and 162 ms."""


class TiledLinear(nn.Module):
    """A layer that computes each row on its own; x `[..., in]` -> `[..., out]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if missing := -count % TILE:
            rows = pad(rows, (0, 0, 0, missing))
        tiles = [self.layer(tile) for tile in torch.split(rows, TILE)]
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return out[:count].reshape(*x.shape[:-1], out.shape[-1])


def tile_linears(module: nn.Module, *others: type[nn.Module]) -> int:
    """Wrap every linear layer, and those of `others`, that may compute a row otherwise beside other rows; how many.

    Packed float32 layers stay whole: oneDNN computes a row alike up to 1,024 rows, with AVX2 and with AVX-512, and in
    tiles the shipped target's step would take 1.2 times as long for one row or 512.
    """
    found = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, TiledLinear)
        for name, child in parent.named_children()
        if isinstance(child, (nn.Linear, PackedLinear, *others)) and not _keeps_its_bits_whole(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, TiledLinear(child))
    return len(found)


def _keeps_its_bits_whole(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLinear) and layer.dtype == torch.float32
