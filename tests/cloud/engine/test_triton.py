"""Test triton's kernels and CUDA graphs on a GPU if there is one, else in triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cloud_verifier.engine.device_sampling import UNKNOWN, Wanted, choose_ahead
from cloud_verifier.engine.sampling import Sampler
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kernels import cuda_graphs, triton_attention
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionBackend, Scoring, SdpaBackend
from cloud_verifier.engine.torch_backend.kernels.cuda_graphs import CudaGraphRecorder, GraphedForward, Outputs
from cloud_verifier.engine.torch_backend.kernels.fusion import TritonRMSNorm, fuse
from cloud_verifier.engine.torch_backend.kernels.triton_attention import TritonBackend, choose
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import FLOAT32_BOUND, check_numerics
from outrider.core.errors import ModelRefused
from outrider.core.sampling import SamplingParams

pytest.importorskip("triton")
from cloud_verifier.engine import triton_race
from cloud_verifier.engine.torch_backend.kernels import triton_kernels

Directory = Callable[[str], Path]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FULL = CUDA or bool(os.environ.get("OUTRIDER_NIGHTLY"))
"""Whether all cases run: the interpreter takes a second or more for one of them."""
NIGHTLY = pytest.mark.skipif(not FULL, reason="runs on a GPU, or with OUTRIDER_NIGHTLY=1")
ON_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
SLOTS = 2048
MIX = ((0, 5, 0), (530, 1, 20), (70, 40, 0), (63, 3, 40), (3, 1, 0))
"""(prefix, chain, nodes) of segments: a prompt's first chunk, a tree behind two spans of keys, a long chunk, one that
ends in a tree of more than a word, a plain step."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what triton imports later interpret too, if it does."""
    monkeypatch.setenv("TRITON_INTERPRET", str(int(triton_kernels.INTERPRETED)))


def random_segment(pool: KVPool, start: int, chain: int, nodes: int, rng: np.random.Generator) -> Segment:
    # Deep, with late children of the root.
    parents = [chain - 1 + int(rng.integers(max(0, node - 2), node + 1)) * (node % 8 < 7) for node in range(nodes)]
    positions = [*range(start, start + chain)]
    for parent in parents:
        positions.append(positions[parent] + 1)
    return Segment(
        tokens=rng.integers(0, 101, chain + nodes),
        chain=chain,
        parents=np.array(parents, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        prefix=rng.permutation(pool.allocate(start)),
        slots=pool.allocate(chain + nodes),
        wants_logits=True,
    )


class Step:
    """Compute random rows over a random pool with a backend."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        mix: Sequence[tuple[int, int, int]] = MIX,
        slots: int = SLOTS,
    ) -> None:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        self.pool = KVPool([LayerShape(kv_heads, dim, dim)], slots, dtype=dtype, device=DEVICE)
        self.pool.keys[0].normal_()
        self.pool.values[0].normal_()
        self.segments = [random_segment(self.pool, *shape, rng) for shape in mix]
        rows = sum(segment.rows for segment in self.segments)
        self.query, self.key, self.value = (
            torch.randn(1, rows, n, dim, device=DEVICE).to(dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads)
        )

    def attend(self, backend: AttentionBackend, scoring: Scoring) -> torch.Tensor:
        plan = backend.plan(self.segments, self.pool)
        return plan.attend(0, self.query, self.key, self.value, scoring)

    def in_float32(self, scoring: Scoring) -> torch.Tensor:
        """Return the reference's result for the same inputs in float32; the pool stays as it was."""
        heads, dim = self.pool.keys[0].shape[1:]
        pool = KVPool([LayerShape(heads, dim, dim)], self.pool.slots, dtype=torch.float32, device=DEVICE)
        pool.keys[0].copy_(self.pool.keys[0])
        pool.values[0].copy_(self.pool.values[0])
        inputs = (x.float() for x in (self.query, self.key, self.value))
        return SdpaBackend().plan(self.segments, pool).attend(0, *inputs, scoring)

    def forget(self) -> None:
        """Forget what the rows wrote."""
        for segment in self.segments:
            self.pool.keys[0][segment.slots] = torch.nan
            self.pool.values[0][segment.slots] = torch.nan


@pytest.mark.parametrize(
    ("heads", "scoring"),
    [
        pytest.param((20, 2, 16), Scoring(0.3), marks=NIGHTLY),
        ((6, 2, 12), Scoring(0.3, window=70, softcap=5.0)),
        pytest.param((6, 2, 12), Scoring(0.3, sinks=torch.linspace(-2, 4, 6)), marks=NIGHTLY),
    ],
    ids=["groups of 10", "softcap and window", "sinks"],
)
def test_a_mixed_step_equals_the_reference(heads: tuple[int, int, int], scoring: Scoring) -> None:
    step = Step(*heads)
    if scoring.sinks is not None:
        scoring = replace(scoring, sinks=scoring.sinks.to(DEVICE))
    expected = step.attend(SdpaBackend(), scoring)
    keys, values = step.pool.keys[0].clone(), step.pool.values[0].clone()
    step.forget()
    assert (step.attend(TritonBackend(), scoring) - expected).abs().max() < 1e-5
    assert torch.equal(step.pool.keys[0], keys)
    assert torch.equal(step.pool.values[0], values)


@NIGHTLY
@pytest.mark.parametrize(
    "mix",
    [
        [(0, 1, 0), (1, 1, 1), (255, 1, 64), (47, 1, 16)],
        pytest.param([(32_768, 1, 64), (8_191, 256, 33)], marks=ON_GPU),
        pytest.param([(300, 1, 4)] * 200, marks=ON_GPU),
    ],
    ids=["small", "long", "many sessions"],
)
def test_heads_of_real_models_are_near_the_reference_in_float32(mix: list[tuple[int, int, int]]) -> None:
    step = Step(32, 8, 128, torch.bfloat16, mix=mix, slots=sum(sum(part) for part in mix))
    scoring = Scoring(128**-0.5)
    expected = step.in_float32(scoring)
    step.forget()
    got = step.attend(TritonBackend(), scoring).float()
    # The rounding of the inputs is the reference's, too; that of the weights and of the result is not.
    assert float((got - expected).norm() / expected.norm()) < 5e-3


class Layers(torch.nn.Module):
    """A norm of its own rounding, and two layers that read the same rows."""

    def __init__(self, norm: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = norm.to(dtype)
        self.gate_proj = torch.nn.Linear(24, 40, bias=False, dtype=dtype)
        self.up_proj = torch.nn.Linear(24, 40, bias=False, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm])
@torch.inference_mode()
def test_fused_layers_compute_what_the_models_own_do(norm: type[torch.nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Layers(norm(24, eps=1e-5), dtype).to(DEVICE)
    module.norm.weight.data.normal_()
    # All heads of a row in one piece, cut out of a wider tensor; and rows that are not adjacent.
    wide = torch.randn(1, 5, 4 * 24, device=DEVICE).to(dtype)
    inputs = wide[..., 24:72].view(1, 5, 2, 24), wide[..., :24], wide.view(1, 5, 4, 24).transpose(1, 2)
    expected = [(module.norm(x), module.gate_proj(x), module.up_proj(x)) for x in inputs]
    assert fuse(module, triton=True) == 3
    assert type(module.norm) is TritonRMSNorm
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for x, (normed, gate, up) in zip(inputs, expected, strict=True):
        assert module.norm(x).is_contiguous()
        torch.testing.assert_close(module.norm(x), normed, atol=close, rtol=close)
        torch.testing.assert_close(module.gate_proj(x), gate, atol=close, rtol=close)
        torch.testing.assert_close(module.up_proj(x), up, atol=close, rtol=close)


@NIGHTLY
@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
def test_a_target_passes_the_numerics_check(kind: str, tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory(kind), dtype="float32", device=str(DEVICE), attention="triton")
    assert model.backend.startswith("triton")
    assert check_numerics(model) < FLOAT32_BOUND / 10
    if CUDA:
        assert model.graphs is not None
        assert bool(model.graphs.recorded) != bool(model.graphs.off)


class Again(CudaGraphRecorder):
    """Stand in for CUDA's graphs: a replay does the work again, on the same tensors."""

    def __init__(self) -> None:
        self.programs = 6

    def warm_up(self, work: Callable[[], Outputs]) -> Outputs:
        return work()

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            work()

        return replay


def new_recorder() -> CudaGraphRecorder:
    return CudaGraphRecorder(DEVICE) if CUDA else Again()


@pytest.fixture
def graphed(tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> tuple[TargetModel, GraphedForward]:
    if not CUDA:
        monkeypatch.setattr(cuda_graphs, "WARM_UPS", 1)  # the interpreter takes seconds for each, and has none to warm
    model = TargetModel.load(tiny_directory("llama"), dtype="float32", device=str(DEVICE), attention="triton")
    model.keep_states()
    model.graphs = GraphedForward(model._outputs, new_recorder, model.config.num_attention_heads, model.layers)
    return model, model.graphs


def pool_of(model: TargetModel) -> KVPool:
    pool = KVPool(model.layers, SLOTS, dtype=model.torch_dtype, device=model.device)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    return pool


def both_ways(
    model: TargetModel, pool: KVPool, mix: Sequence[tuple[int, int, int]], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random step's logits with and without graphs."""
    rng = np.random.default_rng(seed)
    segments = [random_segment(pool, *shape, rng) for shape in mix]
    batch = PackedBatch.pack(segments, model.device)
    got, states = model.forward(batch, model.attention.plan(segments, pool)), model.states
    graphs, model.graphs = model.graphs, None
    plain = model.forward(batch, model.attention.plan(segments, pool))
    assert states is not None and model.states is not None
    assert (states - model.states).abs().max() < 1e-4
    model.graphs = graphs
    for segment in segments:
        pool.release(segment.slots)
        pool.release(segment.prefix)
    return got, plain


@NIGHTLY
def test_graphs_give_what_a_plain_forward_gives(graphed: tuple[TargetModel, GraphedForward]) -> None:
    model, graphs = graphed
    pool = pool_of(model)
    cases: list[tuple[list[tuple[int, int, int]], int]] = [
        ([(9, 1, 14)], 1),  # 15 rows
        ([(3, 18, 9)], 2),  # 27 rows of which the last ten need logits
        ([(30, 1, 3), (0, 4, 0), (5, 1, 2)], 2),  # fewer again
    ]
    kept = []
    for seed, (mix, recorded) in enumerate(cases):
        got, plain = both_ways(model, pool, mix, seed)
        assert got.shape == plain.shape
        assert (got - plain).abs().max() < 1e-4
        assert graphs.recorded == recorded
        kept.append((got, got.clone()))
    assert all(torch.equal(got, copy) for got, copy in kept), "a later replay wrote over earlier logits"
    assert not graphs.off


def test_a_graph_that_computes_something_else_is_not_used(graphed: tuple[TargetModel, GraphedForward]) -> None:
    model, graphs = graphed
    forward, calls = graphs._forward, []

    def drifts(*inputs: object) -> Outputs:
        calls.append(0)
        logits, states = forward(*inputs)
        return logits + len(calls), states

    graphs._forward = drifts
    got, plain = both_ways(model, pool_of(model), [(9, 1, 3)], 0)
    assert (got - plain).abs().max() < 1e-4
    assert "its graph's logits differ" in graphs.off


def rows_of_requests(vocabulary: int) -> tuple[torch.Tensor, list[tuple[Sampler, int, list[int]]]]:
    """Return logits of 36 rows, flat ones and peaked ones, and requests with all ways to sample."""
    ways: list[dict[str, float]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.01},
        {"min_p": 0.02},
        {"temperature": 0.01},
        {"top_k": 2_000, "top_p": 0.9},
        {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    ]
    samplers = [Sampler(SamplingParams(**{"temperature": 0.8, "seed": 5} | way), [3, 4]) for way in ways]  # type: ignore[arg-type]
    wanted = [(sampler, position, [9, 9, 4][:position]) for position in range(4) for sampler in samplers]
    scales = torch.tensor([[1.0, 4.0][row % 2] for row in range(len(wanted))])
    torch.manual_seed(1)
    return torch.randn(len(wanted), vocabulary) * scales[:, None], wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_chosen_on_the_device_are_those_of_the_host(dtype: torch.dtype) -> None:
    logits, wanted = rows_of_requests(5_000)
    # Part of wider rows, as of a model whose logits go beyond the vocabulary.
    logits = torch.cat((logits, logits[:, :8] + 50.0), dim=1).to(DEVICE, dtype)[:, :5_000]
    places = Wanted(
        [sampler for sampler, _, _ in wanted],
        np.arange(len(wanted)),
        np.array([position for _, position, _ in wanted]),
        [path for _, _, path in wanted],
    )
    found = choose_ahead(triton_race.race, logits, places).tolist()
    chosen = [sampler.choose(row, *place) for row, (sampler, *place) in zip(logits, wanted, strict=True)]
    assert all(token in (UNKNOWN, expected) for token, expected in zip(found, chosen, strict=True))
    # Those with both a large top-k and top-p are chosen on the host; few others need it.
    assert found.count(UNKNOWN) <= 4 + 4


@NIGHTLY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_compile_for_gpus_and_fit_them(dtype: str, tmp_path: Path) -> None:
    variables = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("triton_compiles.py")
    ran = subprocess.run(
        [sys.executable, script, dtype], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_auto_is_triton_on_cuda_where_it_is_and_sdpa_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "find_spec", lambda name: object())
    assert choose("auto", torch.device("cuda", 1)) == "triton"
    assert choose("auto", torch.device("cpu")) == "sdpa"
    monkeypatch.setattr(triton_attention, "find_spec", lambda name: None)
    assert choose("auto", torch.device("cuda")) == "sdpa"


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_triton_without_cuda_is_refused(tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
    with pytest.raises(ModelRefused, match="attention triton needs"):
        TargetModel.load(tiny_directory("llama"), attention="triton")
