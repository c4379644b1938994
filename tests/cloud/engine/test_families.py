"""Test which model families are served exactly, which are refused in what words, and that the docs say the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rig import Rig, adversary, client, prompt_of, random_tree
from tiny_targets import SHAPE, VOCAB, Reference, random_module

from cloud_verifier.engine.torch_backend.architecture import (
    DEVIATING,
    LOST_WINDOW,
    OTHER_MODEL,
    OWN_ATTENTION,
    OWN_MASK,
    RUNNING_STATE,
    UNKNOWN_LAYERS,
)
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import FLOAT32_BOUND, check_numerics
from outrider.core.errors import ModelRefused
from outrider.core.sampling import SamplingParams


@dataclass(frozen=True)
class Family:
    """Holds what is expected of a family.

    shape: what its configuration has besides SHAPE.
    refusal: why it is refused; None if it is served.
    note: what docs/models.md says of a served family.
    """

    model_type: str
    shape: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    note: str = ""

    def make(self) -> Any:
        config = transformers.AutoConfig.for_model(self.model_type, **SHAPE | self.shape)
        return random_module(config, self.model_type)


HEAD: dict[str, Any] = {"head_dim": 12}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
STATE: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1}


def served(model_type: str, note: str = "", **shape: Any) -> Family:
    return Family(model_type, shape, note=note)


def refused(model_type: str, refusal: str, **shape: Any) -> Family:
    return Family(model_type, shape, refusal)


FAMILIES: dict[str, Family] = {
    "bloom": refused("bloom", OWN_ATTENTION, n_layer=2, n_head=4),
    "cohere": served("cohere"),
    "cohere2": served("cohere2", "sliding windows", **WINDOWS),
    "deepseek_v3": served("deepseek_v3", "latent attention", **LATENT),
    "diffllama": refused("diffllama", DEVIATING),
    "doge": refused("doge", OWN_MASK),
    "exaone4": served("exaone4", "sliding windows", **WINDOWS),
    "falcon": refused("falcon", OWN_ATTENTION),
    "gemma": served("gemma", **HEAD),
    "gemma2": served("gemma2", "sliding windows, soft caps", **HEAD, sliding_window=9, attn_logit_softcapping=5.0),
    "gemma3_text": served("gemma3_text", "sliding windows", **HEAD, **WINDOWS),
    "gemma4_text": served(
        "gemma4_text",
        "sliding windows, layers that share keys and values",
        **HEAD,
        sliding_window=9,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        global_head_dim=24,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
    "glm": served("glm", **HEAD),
    "glm4": served("glm4", **HEAD),
    "glm4_moe": served("glm4_moe", **HEAD, **{k: LATENT[k] for k in list(LATENT)[6:]}),
    "gpt2": served("gpt2", n_embd=48, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": served("gpt_neox"),
    "gpt_oss": served("gpt_oss", "sliding windows, sinks", **HEAD, sliding_window=9, num_local_experts=4),
    "granite": served("granite"),
    "granitemoe": served("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "granitemoehybrid": refused(
        "granitemoehybrid", RUNNING_STATE, **STATE, layer_types=["mamba", "attention"], num_local_experts=4
    ),
    "granitemoehybrid, attention alone": served(
        "granitemoehybrid",
        **STATE,
        layer_types=["attention", "attention"],
        num_local_experts=4,
        shared_intermediate_size=64,
    ),
    "jamba": refused("jamba", RUNNING_STATE, attn_layer_period=2, attn_layer_offset=1),
    "lfm2": refused("lfm2", RUNNING_STATE, layer_types=["conv", "full_attention"]),
    "llama": served("llama"),
    "llama, dynamic rope": served(
        "llama",
        "up to `max_position_embeddings`",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
    "llama4_text": refused("llama4_text", UNKNOWN_LAYERS, **HEAD, num_local_experts=4, intermediate_size_mlp=64),
    "mamba2": refused("mamba2", RUNNING_STATE, num_heads=4, head_dim=24, state_size=8, n_groups=1),
    "ministral3": served(
        "ministral3",
        "queries scaled by position",
        **HEAD,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "mistral": served("mistral", "sliding windows", sliding_window=11),
    "mixtral": served("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "olmo2": served("olmo2"),
    "olmo3": served("olmo3", "sliding windows", **WINDOWS),
    "olmoe": served("olmoe", **EXPERTS),
    "phi3": served("phi3", "sliding windows", sliding_window=9),
    "phi3, longrope": served(
        "phi3",
        "up to `original_max_position_embeddings`",
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 6,
            "long_factor": [2.0] * 6,
            "original_max_position_embeddings": 128,
        },
    ),
    "phimoe": served("phimoe", num_local_experts=4, sliding_window=256),
    "phimoe, sliding windows": refused("phimoe", LOST_WINDOW, num_local_experts=4, sliding_window=9),
    "qwen2": served("qwen2"),
    "qwen2_moe": served("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3": served("qwen3", **HEAD),
    "qwen3_5_text": refused("qwen3_5_text", RUNNING_STATE, **HEAD),
    "qwen3_moe": served("qwen3_moe", **HEAD, **EXPERTS),
    "qwen3_next": refused("qwen3_next", RUNNING_STATE, **HEAD, **EXPERTS),
    "smollm3": served("smollm3"),
    "stablelm": served(
        "stablelm", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "starcoder2": served("starcoder2", "sliding windows", sliding_window=9),
}

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEADER = "| family | served | note |"
TOKENS = 16
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
SERVED = [name for name, family in FAMILIES.items() if not family.refusal]
REFUSED = [name for name, family in FAMILIES.items() if family.refusal]


@torch.inference_mode()
def generate(module: Any, prompt: list[int]) -> list[int]:
    """Return the tokens of transformers' own greedy generation."""
    ids = module.generate(
        torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SERVED)
def test_a_served_family_gives_the_tokens_of_transformers_with_trees_and_beside_other_sessions(name: str) -> None:
    module = FAMILIES[name].make()
    prompts = {"greedy": prompt_of(13), "longer": prompt_of(30, seed=1), "sampled": prompt_of(9, seed=2)}
    expected = {key: generate(module, prompts[key]) for key in ("greedy", "longer")}
    expected["sampled"] = Reference(module).generate(prompts["sampled"], TOKENS, SAMPLED, ignore_eos=True)
    model = TargetModel(module, name="m")
    check_numerics(model)
    rig = Rig(model)
    for key, draft in (
        ("greedy", adversary(expected["greedy"])),
        ("longer", random_tree),
        ("sampled", adversary(expected["sampled"])),
    ):
        sampling = SAMPLED if key == "sampled" else SamplingParams()
        rig.attach(key, client(prompts[key], draft, TOKENS, sampling=sampling, ignore_eos=True))
    rig.run()
    assert {key: one.device.received for key, one in rig.clients.items()} == expected
    assert rig.engine.counters.accepted > 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_served_is_refused_in_plain_words(name: str) -> None:
    family = FAMILIES[name]
    assert family.refusal
    with pytest.raises(ModelRefused) as caught:
        check_numerics(TargetModel(family.make(), name="m"))
    said = str(caught.value)
    assert said.startswith(f"m (model type {family.model_type}) cannot be served: {family.refusal}")
    assert said.endswith(f"; {OTHER_MODEL}")


@pytest.mark.parametrize(("family", "longest"), [("llama, dynamic rope", 256), ("phi3, longrope", 128)])
def test_a_sequence_ends_where_its_length_would_change_the_positions_of_the_whole_batch(
    family: str, longest: int
) -> None:
    modules = [FAMILIES[family].make() for _ in range(3)]
    ids = list(range(VOCAB)) * 3
    with torch.inference_mode():
        within, beyond = (
            module(torch.tensor([ids[:length]])).logits[0, :longest]
            for module, length in zip(modules[1:], (longest, len(ids)), strict=True)
        )
    assert (within - beyond).abs().max() > 0.01
    model = TargetModel(modules[0], name="m")
    check_numerics(model)
    assert model.max_sequence == longest
    assert (model.linear_logits(ids[:longest]) - within).abs().max() < FLOAT32_BOUND / 10


def row(name: str, family: Family) -> str:
    """Return the family's row in the table of docs/models.md."""
    if family.refusal:
        return f"| {name} | no | {family.refusal} |"
    return f"| {name} | yes | {family.note} |"


def test_the_docs_list_the_families_as_they_are_tested() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = lines[lines.index(HEADER) + 2 :]
    table = table[: table.index("")]
    assert table == [row(name, family) for name, family in FAMILIES.items()]
