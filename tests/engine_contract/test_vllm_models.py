"""Test which kinds of targets vLLM serves under our sessions: each passes the check of its outputs, or is refused."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

if "OUTRIDER_REQUIRE_VLLM" not in os.environ:
    pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
from engine_builds import CONFIG

from cloud_verifier.engine.vllm_backend import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm import ir
from vllm.engine.arg_utils import EngineArgs

from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.vllm_backend import load
from cloud_verifier.engine.vllm_backend.executor import VllmExecutor
from cloud_verifier.engine.vllm_backend.worker import CPU_KERNELS
from outrider.core.errors import ModelRefused

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
SERVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen3 of 151,936 ids": lambda: transformers.Qwen3Config(**{**SHAPE, "vocab_size": 151_936}),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma2 with sliding windows": lambda: transformers.Gemma2Config(**SHAPE, sliding_window=32),
}
LATENT: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR_ATTENTION: dict[str, Any] = {
    **SHAPE,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
REFUSED: dict[str, Callable[[], Any]] = {
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**LATENT),
    "mamba2": lambda: transformers.Mamba2Config(**SHAPE, num_heads=8, state_size=16, n_groups=1, expand=2),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **LINEAR_ATTENTION,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
}
"""Latent attention, and hybrids, none of which vLLM runs on a CPU with draft tokens."""

EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
NIGHTLY = pytest.mark.nightly("a start of vLLM for each takes long")
OFTEN = ("llama", "gpt_oss", "mamba2")
"""The kinds that are not left to the nightly run."""


def often(kinds: Iterable[str]) -> list[Any]:
    """Return the kinds as parameters, of which only a few are tried by day."""
    return [kind if kind in OFTEN else pytest.param(kind, marks=NIGHTLY) for kind in kinds]


def _quantise(folder: Path) -> None:
    """Rewrite a model's projections as 8-bit integers with a scale for each output, as compressed-tensors lays out."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().clamp(-127, 127).to(torch.int8)
        weights[f"{name}_scale"] = scale.float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**EIGHT_BITS, "strategy": "channel", "dynamic": False},
                "input_activations": {**EIGHT_BITS, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def made(folder: Path, config: Any) -> Path:
    """Write a random model with sharper logits than the default initialisation gives."""
    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    module.save_pretrained(folder)
    return folder


ALL = len(load.CHECK_PROMPTS) * load.CHECK_TOKENS
"""Tokens that the check of outputs compares."""


def serve(folder: Path, **options: Any) -> int:
    """Load and check a target as a verifier does; return the number of tokens found equal. Raises ModelRefused."""
    half = options.get("dtype", "float32") != "float32"
    core = load.engine_core(folder, CONFIG, **{"dtype": "float32", "nodes": 8, **options})
    try:
        executor = VllmExecutor(core, CONFIG, label=folder.name, eos_token_ids=load.eos_token_ids(core))
        assert executor.eos_token_ids == (7,)
        equal = load.check_outputs(executor, CONFIG, half=half)
        cost = load.profile(executor, 64, CONFIG.max_sessions)
        assert len(cost.table()) > 4 and cost.seconds(1, 1) > 0.0
        return equal
    finally:
        core.shutdown()


@pytest.mark.parametrize("kind", often(SERVED))
def test_a_target_of_this_kind_is_served_and_passes_its_check(kind: str, tmp_path: Path) -> None:
    assert serve(made(tmp_path / "target", SERVED[kind]())) == ALL


def test_an_id_beyond_the_vocabulary_is_never_chosen(tmp_path: Path) -> None:
    core = load.engine_core(made(tmp_path / "target", SERVED["llama"]()), CONFIG, dtype="float32", nodes=8)
    try:
        executor = VllmExecutor(core, CONFIG, label="target", vocabulary=100)  # of 512 logits
        assert executor.capabilities.vocabulary == 100
        prompts = [[seed, 5, 9] for seed in range(8)]
        found = load._continue(Engine(executor, CONFIG), "", prompts, {}, random.Random(0))
        assert all(token < 100 for tokens in found for token, _ in tokens)
    finally:
        core.shutdown()


def test_norms_are_computed_by_kernels_that_give_what_torch_gives(tmp_path: Path) -> None:
    load.engine_core(made(tmp_path / "target", SERVED["llama"]()), CONFIG, dtype="float32", nodes=8).shutdown()
    torch.manual_seed(0)
    rows, residual, weight = torch.randn(3, 2, 64)[:, 1], torch.randn(3, 64), torch.rand(64)  # rows with strides
    for op, given in ((ir.ops.rms_norm, (rows,)), (ir.ops.fused_add_rms_norm, (rows.contiguous(), residual))):
        assert op.get_priority() == [CPU_KERNELS, "native"]
        assert op.dispatch(*given, weight, 1e-5).provider == CPU_KERNELS
        assert op.dispatch(*given, None, 1e-5).provider == "native"
        expected, got = op.impls["native"].impl_fn(*given, weight, 1e-5), op(*given, weight, 1e-5)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_a_context_that_does_not_fit_is_refused_with_what_to_set(tmp_path: Path) -> None:
    folder = made(tmp_path / "target", SERVED["llama"]())
    few = {"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 1 << 28}
    with pytest.raises(ModelRefused, match=r"""--engine-args '{"max_model_len": \d+}'"""):
        load.engine_core(folder, CONFIG, dtype="float32", nodes=8, further=few)
    core = load.engine_core(folder, CONFIG, dtype="float32", nodes=8, further={**few, "max_model_len": -1})
    try:
        executor = VllmExecutor(core, CONFIG, label="target", eos_token_ids=load.eos_token_ids(core))
        assert executor.capabilities.max_sequence == executor.usage.capacity == 8 * load.CPU_BLOCK
    finally:
        core.shutdown()


def test_a_target_with_quantised_weights_is_served(tmp_path: Path) -> None:
    folder = made(tmp_path / "target", SERVED["llama"]())
    _quantise(folder)
    assert serve(folder, dtype="bfloat16") > ALL // 2


@NIGHTLY
def test_tensor_parallelism_over_two_workers_gives_the_same_tokens(tmp_path: Path) -> None:
    assert serve(made(tmp_path / "target", SERVED["llama"]()), further={"tensor_parallel_size": 2}) == ALL


@NIGHTLY
def test_pipeline_parallelism_over_two_workers_gives_the_same_tokens(tmp_path: Path) -> None:
    """The check leaves out sequences after draft tokens were accepted: then the first worker needs these tokens."""
    further = {"pipeline_parallel_size": 2}
    assert serve(made(tmp_path / "target", SERVED["llama"]()), further=further) == ALL


@pytest.mark.parametrize("kind", often(REFUSED))
def test_a_target_of_this_kind_is_refused_on_a_cpu_before_it_is_loaded(kind: str, tmp_path: Path) -> None:
    latent = kind == "deepseek_v2"
    if latent and torch.cpu._is_amx_tile_supported():
        pytest.skip("on a CPU with AMX vLLM reads its prompts in pieces, which has not been tried")
    with pytest.raises(ModelRefused, match="read whole" if latent else "running state of the sequence"):
        serve(made(tmp_path / "target", REFUSED[kind]()))


def test_the_page_lists_these_families() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = page.partition("\n## Which targets vLLM serves\n")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| (\w+) \| (yes|no) \|", section, re.MULTILINE))
    tested = {kind.partition(" ")[0]: "yes" for kind in SERVED} | dict.fromkeys(REFUSED, "no")
    assert listed == tested


def test_a_target_with_recurrent_layers_has_no_prefix_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def settings(name: str, config: Any) -> Any:
        return load.engine_settings(EngineArgs(model=str(made(tmp_path / name, config)), enable_prefix_caching=True))

    assert settings("plain", SERVED["llama"]()).cache_config.enable_prefix_caching is True
    assert "without a prefix cache" not in caplog.text
    cache = settings("hybrid", REFUSED["qwen3_next"]()).cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (False, "none")
    assert "without a prefix cache" in caplog.text
