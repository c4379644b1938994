"""Build targets and drafts of real shapes with random weights: they take as long as trained ones, without a download.

A plain random model cannot repeat a continuation in another batch: its best two tokens are so close that bfloat16
confuses them every few dozen tokens. So here the output head is the embedding itself under one cycle through the whole
vocabulary, and the layers together add about as much to the residual stream as the embedding put there: the head then
names one token clearly, hardly influenced by the prefix, and no token recurs before all others. The computation per
token depends on the shape alone, not on the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from cloud_verifier.engine.torch_backend.model import BACKENDS, TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics

POSITIONS = 8_192


@dataclass(frozen=True)
class ModelShape:
    """Describe the shape of a Llama, or of a Qwen3. The head always has weights of its own, also if the real model ties
    it to the embedding: that takes memory and no time, because only the rows of a step's tokens are read of an
    embedding."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int = 128_256
    qwen3: bool = False

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 2 * self.head_dim * self.qwen3
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def kv_values(self) -> int:
        """Return how many numbers a token's keys and values are, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def config(self) -> PreTrainedConfig:
        return (Qwen3Config if self.qwen3 else LlamaConfig)(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            max_position_embeddings=POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-8b", 4096, 36, 32, 8, 128, 12_288, 151_936, qwen3=True),
        ModelShape("qwen3-1.7b", 2048, 28, 16, 8, 128, 6_144, 151_936, qwen3=True),
        ModelShape("qwen3-0.6b", 1024, 28, 16, 8, 128, 3_072, 151_936, qwen3=True),
        ModelShape("qwen3-0.2b", 768, 8, 12, 4, 64, 2_048, 151_936, qwen3=True),
        ModelShape("8b", 4096, 32, 32, 8, 128, 14_336),
        ModelShape("3b", 3072, 28, 24, 8, 128, 8_192),
        ModelShape("1b", 2048, 16, 32, 8, 64, 8_192),
        ModelShape("0.5b", 896, 24, 14, 2, 64, 4_864),
        ModelShape("0.2b", 768, 8, 12, 4, 64, 2_048),
        ModelShape("tiny", 64, 2, 4, 2, 16, 128, 512),
        ModelShape("tiniest", 32, 1, 2, 1, 16, 64, 512),
    )
}
"""The shapes of Qwen3 and of Llama 3.1 and 3.2; 0.5b is Qwen2.5's with Llama's vocabulary, and the 0.2b are ours."""
DRAFTS = {
    "qwen3-8b": "qwen3-0.6b",
    "qwen3-1.7b": "qwen3-0.2b",
    "8b": "0.5b",
    "3b": "0.5b",
    "1b": "0.2b",
    "tiny": "tiniest",
}
"""Target -> its draft, which has 7 to 16% of its parameters."""


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype in which the verifier computes on a device by default."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def backend_on(device: torch.device, attention: str = "auto") -> str:
    """Resolve `auto` to triton on CUDA if there is such a backend, and to sdpa otherwise."""
    if attention != "auto":
        return attention
    return "triton" if device.type == "cuda" and "triton" in BACKENDS else "sdpa"


def random_model(shape: ModelShape, device: torch.device, *, attention: str = "auto", seed: int = 0) -> TargetModel:
    """Return a random model that is ready for an engine. Raises ModelRefused if the numerics check fails."""
    backend = BACKENDS[backend_on(device, attention)]()
    model = TargetModel(random_module(shape, device, seed=seed), name=shape.name, backend=backend)
    check_numerics(model)
    return model


def random_module(shape: ModelShape, device: torch.device, *, seed: int = 0) -> Any:
    """Return the transformers module of a random model; the same one for the same seed on the same device."""
    torch.manual_seed(seed)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype_on(device), attn_implementation="sdpa"
        ).requires_grad_(False)
    _make_definite(module)
    return module


@torch.no_grad()
def _make_definite(module: Any) -> None:
    """Set embeddings of size 1, layers that add about 1 in all, and a head that maps a token to its successor."""
    embedding = module.get_input_embeddings().weight
    vocabulary, hidden = embedding.shape
    embedding.normal_()
    layers = module.model.layers
    for layer in layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.mul_((2 * len(layers)) ** -0.5)
    cycle = torch.randperm(vocabulary, device=embedding.device)
    before = torch.empty_like(cycle)
    before[cycle] = cycle.roll(1)
    module.get_output_embeddings().weight.copy_(embedding[before]).mul_(hidden**-0.5)
