"""Test that linear layers packed for oneDNN compute the same, with bits independent of the neighbours."""

import pytest
import torch
from torch import nn

from cloud_verifier.engine.torch_backend.kernels import linear as kernels
from cloud_verifier.engine.torch_backend.kernels.linear import (
    PackedLinear,
    pack_linears,
    packed_if_equal,
)

pytestmark = pytest.mark.skipif(kernels._pack is None, reason="this torch has no packed linear")


def _rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 33])
def test_a_packed_layer_computes_what_the_layer_did(rows: int, bias: bool) -> None:
    linear = nn.Linear(64, 96, bias=bias)
    x = _rows(rows, 64)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        packed = packed_if_equal(nn.Linear(512, 1280, bias=False).to(dtype))
    if packed is None:
        pytest.skip(f"this processor packs no {dtype}")
    x = _rows(16, 512, dtype)
    with torch.inference_mode():
        full = packed(x)
        for count in range(1, 16):
            assert torch.equal(packed(x[:count]), full[:count])


def test_steps_of_every_size_meet_few_shapes_so_that_what_onednn_keeps_of_each_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, linear, met = PackedLinear(nn.Linear(8, 8)), kernels._linear, set()

    def watched(rows: torch.Tensor, *rest: object) -> torch.Tensor:
        met.add(rows.shape[0])
        return linear(rows, *rest)

    monkeypatch.setattr(kernels, "_linear", watched)
    with torch.inference_mode():
        for count in range(1, 513):
            assert packed(_rows(count, 8)).shape == (count, 8)
    assert len(met) < 50
    assert set(range(4, 17)) <= met, "small steps are computed as they are"


def test_a_layer_that_comes_out_different_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    first = module[0]
    monkeypatch.setattr(kernels, "_agrees", lambda packed, linear: linear is not first)
    assert pack_linears(module) == 1
    assert module[0] is first
    assert isinstance(module[2], PackedLinear)
