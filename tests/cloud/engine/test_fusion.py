"""Test that fused operators compute what a model's own modules do, and that a module which does more is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cloud_verifier.engine.torch_backend.kernels import fusion
from cloud_verifier.engine.torch_backend.kernels import linear as kernels
from cloud_verifier.engine.torch_backend.kernels.fusion import fuse

needs_packing = pytest.mark.skipif(kernels._pack is None, reason="this torch has no packed linear")


class Projections(nn.Module):
    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48, bias=bias, dtype=dtype)
        self.k_proj = nn.Linear(32, 16, bias=bias, dtype=dtype)
        self.v_proj = nn.Linear(32, 16, bias=bias, dtype=dtype)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 4, 16, 33])
@torch.inference_mode()
def test_parallel_layers_computed_as_one_give_each_layers_own_result(bias: bool, count: int) -> None:
    module = Projections(bias)
    names = ("q_proj", "k_proj", "v_proj")
    x = rows(1, count, 32)
    expected = [getattr(module, name)(x) for name in names]
    assert fuse(module) == 3
    for name, result in zip(names, expected, strict=True):
        torch.testing.assert_close(getattr(module, name)(x), result, atol=1e-5, rtol=1e-5)


def test_layers_are_not_joined_if_one_of_them_does_more_or_has_another_shape_or_dtype() -> None:
    class Special(nn.Linear):
        pass

    special, other, half, lone = Projections(), Projections(), Projections(dtype=torch.bfloat16), Projections()
    special.k_proj = Special(32, 16)
    other.v_proj = nn.Linear(8, 16, bias=False)
    del lone.v_proj
    assert [fuse(module) for module in (special, other, half, lone)] == [0, 0, 0, 0]


def test_a_product_that_comes_out_different_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "packed_if_equal", lambda linear: None)
    module = Projections()
    assert fuse(module) == 0
    assert type(module.q_proj) is nn.Linear
