"""List model families with a tiny configuration of each, and whether the engine serves them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny_targets import SHAPE, VOCAB

from cloud_verifier.engine.torch_backend.architecture import (
    DEVIATING,
    LOST_WINDOW,
    OWN_ATTENTION,
    OWN_MASK,
    RUNNING_STATE,
    UNKNOWN_LAYERS,
    UnservedArchitecture,
)


@dataclass(frozen=True)
class Family:
    """Holds what is expected of a family.

    shape: what its configuration has besides SHAPE.
    refusal: why it is refused; None if it is served.
    note: what docs/models.md says of a served family.
    """

    model_type: str
    shape: dict[str, Any] = field(default_factory=dict)
    refusal: UnservedArchitecture | None = None
    note: str = ""

    def make(self) -> Any:
        """Make a random module, with sharper logits than the default initialisation gives."""
        config = transformers.AutoConfig.for_model(self.model_type, **SHAPE | self.shape)
        torch.manual_seed(sum(self.model_type.encode()))
        module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
        return module.eval()


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


def mixture(model_type: str, note: str = "", **shape: Any) -> Family:
    return Family(model_type, shape, note=note)


def refused(model_type: str, refusal: UnservedArchitecture, **shape: Any) -> Family:
    return Family(model_type, shape, refusal)


FAMILIES: dict[str, Family] = {
    "apertus": served("apertus"),
    "arcee": served("arcee"),
    "bamba": refused("bamba", RUNNING_STATE, **STATE, attn_layer_indices=[1]),
    "bloom": refused("bloom", OWN_ATTENTION, n_layer=2, n_head=4),
    "cohere": served("cohere"),
    "cohere2": served("cohere2", "sliding windows", **WINDOWS),
    "deepseek_v2": mixture("deepseek_v2", "latent attention", **LATENT),
    "deepseek_v3": mixture("deepseek_v3", "latent attention", **LATENT),
    "deepseek_v32": refused("deepseek_v32", UNKNOWN_LAYERS, **LATENT, index_n_heads=2, index_head_dim=16, index_topk=4),
    "diffllama": refused("diffllama", DEVIATING),
    "doge": refused("doge", OWN_MASK),
    "ernie4_5": served("ernie4_5", **HEAD),
    "ernie4_5_moe": mixture(
        "ernie4_5_moe", **HEAD, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1
    ),
    "exaone4": served("exaone4", "sliding windows", **WINDOWS),
    "falcon": refused("falcon", OWN_ATTENTION),
    "falcon_h1": refused("falcon_h1", RUNNING_STATE, **STATE, mamba_d_ssm=96),
    "gemma": served("gemma", **HEAD),
    "gemma2": served("gemma2", "sliding windows, soft caps", **HEAD, sliding_window=9, attn_logit_softcapping=5.0),
    "gemma3_text": served("gemma3_text", "sliding windows", **HEAD, **WINDOWS),
    "gemma3n_text": served(
        "gemma3n_text",
        "sliding windows",
        **HEAD,
        **WINDOWS,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
        laurel_rank=8,
    ),
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
    "glm4_moe": mixture("glm4_moe", **HEAD, **{k: LATENT[k] for k in list(LATENT)[6:]}),
    "glm_moe_dsa": refused("glm_moe_dsa", UNKNOWN_LAYERS, **LATENT, index_n_heads=2, index_head_dim=16, index_topk=4),
    "gpt2": served("gpt2", n_embd=48, n_layer=2, n_head=4, n_positions=256),
    "gpt_bigcode": served("gpt_bigcode", n_embd=48, n_layer=2, n_head=4, n_positions=256),
    "gpt_neo": refused("gpt_neo", OWN_ATTENTION, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "gpt_neox": served("gpt_neox"),
    "gpt_oss": mixture("gpt_oss", "sliding windows, sinks", **HEAD, sliding_window=9, num_local_experts=4),
    "gptj": refused("gptj", OWN_ATTENTION, n_embd=48, n_layer=2, n_head=4, n_positions=256, rotary_dim=8),
    "granite": served("granite"),
    "granitemoe": mixture("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "granitemoehybrid": refused(
        "granitemoehybrid", RUNNING_STATE, **STATE, layer_types=["mamba", "attention"], num_local_experts=4
    ),
    "granitemoehybrid, attention alone": mixture(
        "granitemoehybrid",
        **STATE,
        layer_types=["attention", "attention"],
        num_local_experts=4,
        shared_intermediate_size=64,
    ),
    "helium": served("helium", **HEAD),
    "hunyuan_v1_dense": served(
        "hunyuan_v1_dense",
        **HEAD,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
    ),
    "hunyuan_v1_moe": mixture("hunyuan_v1_moe", **HEAD, num_experts=4, moe_topk=2),
    "internlm3": served("internlm3"),
    "jamba": refused("jamba", RUNNING_STATE, attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": refused("kimi_linear", RUNNING_STATE, **LATENT),
    "lfm2": refused("lfm2", RUNNING_STATE, layer_types=["conv", "full_attention"]),
    "llama": served("llama"),
    "llama, dynamic rope": served(
        "llama",
        "up to `max_position_embeddings`",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
    "llama4_text": refused("llama4_text", UNKNOWN_LAYERS, **HEAD, num_local_experts=4, intermediate_size_mlp=64),
    "mamba2": refused("mamba2", RUNNING_STATE, num_heads=4, head_dim=24, state_size=8, n_groups=1),
    "minicpm3": served("minicpm3", "latent attention", **{name: LATENT[name] for name in list(LATENT)[:6]}),
    "minimax_m2": mixture("minimax_m2", **HEAD, num_local_experts=4, num_experts_per_tok=2, rotary_dim=12),
    "ministral": served("ministral", "sliding windows", **HEAD, sliding_window=9),
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
    "mixtral": mixture("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mpt": refused("mpt", OWN_ATTENTION, d_model=48, n_layers=2, n_heads=4),
    "nemotron": served("nemotron"),
    "nemotron_h": refused("nemotron_h", RUNNING_STATE, **HEAD, layers_block_type=["mamba", "attention"]),
    "olmo": served("olmo"),
    "olmo2": served("olmo2"),
    "olmo3": served("olmo3", "sliding windows", **WINDOWS),
    "olmoe": mixture("olmoe", **EXPERTS),
    "opt": served("opt", ffn_dim=64, word_embed_proj_dim=48),
    "phi": served("phi"),
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
    "phimoe": mixture("phimoe", num_local_experts=4, sliding_window=256),
    "phimoe, sliding windows": refused("phimoe", LOST_WINDOW, num_local_experts=4, sliding_window=9),
    "qwen2": served("qwen2"),
    "qwen2_moe": mixture("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3": served("qwen3", **HEAD),
    "qwen3_5_text": refused("qwen3_5_text", RUNNING_STATE, **HEAD),
    "qwen3_moe": mixture("qwen3_moe", **HEAD, **EXPERTS),
    "qwen3_next": refused("qwen3_next", RUNNING_STATE, **HEAD, **EXPERTS),
    "seed_oss": served("seed_oss", **HEAD),
    "smollm3": served("smollm3"),
    "stablelm": served(
        "stablelm", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "starcoder2": served("starcoder2", "sliding windows", sliding_window=9),
    "zamba2": refused("zamba2", RUNNING_STATE, layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4),
}
