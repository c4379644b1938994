"""Test that tiled linear layers compute the same function, always for the same number of rows."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cloud_verifier.engine.torch_backend.kernels.linear import (
    TILE,
    PackedLinear,
    TiledLinear,
    pack_linears,
    tile_linears,
)


class Watched(nn.Linear):
    met: set[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.met.add(x.shape[0])
        return super().forward(x)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
def test_a_tiled_layer_computes_what_the_layer_did_and_always_for_as_many_rows(rows: int) -> None:
    layer = Watched(8, 6)
    layer.met = set()
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    out = TiledLinear(layer)(x)
    assert layer.met == {TILE}
    torch.testing.assert_close(out, layer(x))


def test_leading_dimensions_are_kept() -> None:
    assert TiledLinear(nn.Linear(8, 6))(torch.zeros(1, 2, 3, 8)).shape == (1, 2, 3, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_how_many_there_are(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(512, 1280, bias=False).to(dtype))
    pack_linears(module)
    tile_linears(module)
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        whole = module(x)
        for rows in (*range(16, 1024, 48), 1024):
            assert torch.equal(module(x[:rows]), whole[:rows])
        for row in range(100):
            padded = torch.cat([x[row : row + 1], x.new_zeros(15, 512)])
            assert torch.equal(module(padded)[:1], whole[row : row + 1])


def test_every_layer_is_tiled_but_a_packed_one_in_float32() -> None:
    packed = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8).bfloat16()))
    if not pack_linears(packed):
        pytest.skip("this torch has no packed linear")
    module = nn.Sequential(packed, nn.Linear(8, 8), Conv1D(8, 8), nn.LayerNorm(8))
    assert tile_linears(module, Conv1D) == 3
    kinds = [type(part) for part in (packed[0], packed[1][0], *module[1:])]
    assert kinds == [PackedLinear, TiledLinear, TiledLinear, TiledLinear, nn.LayerNorm]
    assert tile_linears(module, Conv1D) == 0
