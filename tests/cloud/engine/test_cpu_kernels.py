"""Test what replaces a model's layers on a CPU, and attention to several sessions in one call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kernels import attention, fusion
from cloud_verifier.engine.torch_backend.kernels import linear as kernels
from cloud_verifier.engine.torch_backend.kernels.attention import Scoring, SdpaBackend
from cloud_verifier.engine.torch_backend.kernels.fusion import fuse
from cloud_verifier.engine.torch_backend.kernels.linear import PackedLinear, pack_linears, packed_if_equal
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SINKS = torch.tensor([0.3, -0.2, 0.1, 0.0])
SCORINGS = [Scoring(0.35), Scoring(0.35, window=5), Scoring(0.35, softcap=2.0), Scoring(0.35, sinks=SINKS)]


def segments(pool: KVPool, shapes: tuple[tuple[int, int, tuple[int, ...]], ...]) -> list[Segment]:
    """Return sessions of these shapes, with slots that are not adjacent."""
    found = []
    for start, chain, parents in shapes:
        positions = list(range(start, start + chain))
        for parent in parents:
            positions.append(positions[parent] + 1)
        slots = np.random.default_rng(start).permutation(pool.allocate(start + len(positions)))
        tokens = np.zeros(len(positions), dtype=np.int64)
        rows = np.array(parents, dtype=np.int64)
        found.append(Segment(tokens, chain, rows, np.array(positions), slots[:start], slots[start:], True))
    return found


def filled_pool() -> KVPool:
    pool = KVPool((LayerShape(KV_HEADS, WIDTH, WIDTH),), 300, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=generator)
    return pool


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("start", [0, 30])
def test_a_prompt_in_blocks_gets_what_it_gets_as_a_whole(
    scoring: Scoring, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = filled_pool()
    shapes = ((start, 60, (59, 60, 59)), (9, 1, (0,)), (start, 41, ()))
    sessions = segments(pool, shapes)
    rows = sum(segment.rows for segment in sessions)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, rows, WIDTH, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, rows, WIDTH, generator=generator) for _ in range(2))
    found = []
    for block in (100, 16):
        monkeypatch.setattr(attention, "_BLOCK_ROWS", block)
        found.append(SdpaBackend().plan(sessions, pool).attend(0, query, key, value, scoring).clone())
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


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

    special, other, half, lone = Projections(), Projections(), Projections(dtype=torch.float16), Projections()
    special.k_proj = Special(32, 16)
    other.v_proj = nn.Linear(8, 16, bias=False)
    del lone.v_proj
    assert [fuse(module) for module in (special, other, half, lone)] == [0, 0, 0, 0]


def test_a_product_that_comes_out_different_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "packed_if_equal", lambda linear: None)
    module = Projections()
    assert fuse(module) == 0
    assert type(module.q_proj) is nn.Linear


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        packed = packed_if_equal(nn.Linear(512, 1280, bias=False).to(dtype))
    if packed is None:
        pytest.skip(f"this processor packs no {dtype}")
    x = rows(16, 512).to(dtype)
    with torch.inference_mode():
        full = packed(x)
        for count in range(1, 16):
            assert torch.equal(packed(x[:count]), full[:count])


@needs_packing
def test_steps_of_every_size_meet_few_shapes_so_that_what_onednn_keeps_of_each_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, linear, met = PackedLinear(nn.Linear(8, 8)), kernels._linear, set()

    def watched(x: torch.Tensor, *rest: object) -> torch.Tensor:
        met.add(x.shape[0])
        return linear(x, *rest)

    monkeypatch.setattr(kernels, "_linear", watched)
    with torch.inference_mode():
        for count in range(1, 513):
            assert packed(rows(count, 8)).shape == (count, 8)
    assert len(met) < 50
    assert set(range(4, 17)) <= met, "small steps are computed as they are"


@needs_packing
def test_a_layer_that_comes_out_different_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    first = module[0]
    monkeypatch.setattr(kernels, "agree", lambda layers, packed: layers[0] is not first)
    assert pack_linears(module) == 1
    assert module[0] is first
    assert isinstance(module[2], PackedLinear)


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


@needs_packing
@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (LlamaConfig(**SIZES), 2),
        (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu"), 2),
        (MistralConfig(**SIZES, sliding_window=8), 2),
        (Qwen3Config(**SIZES), 0),  # it has norms of queries and keys
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_as_llamas_are_computed_in_one_function_and_others_by_their_modules(
    config: PretrainedConfig, fused: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # norms and biases begin with ones and zeros
    model = TargetModel(module, name=config.model_type)
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        fused = 0  # a CPU without AVX-512 packs no weights in bfloat16
    assert sum("forward" in vars(layer) for layer in module.modules()) == fused
    check_numerics(model)  # against the modules


@needs_packing
def test_a_layer_whose_attention_takes_another_scale_hands_it_on() -> None:
    module = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="eager")
    for layer in module.model.layers:
        layer.self_attn.scaling = 0.7
    model = TargetModel(module, name="scaled")
    assert all("forward" in vars(layer) for layer in module.model.layers)
    check_numerics(model)
