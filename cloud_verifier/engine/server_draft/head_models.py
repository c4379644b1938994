"""Compute heads on a target: small networks over its last hidden states that predict tokens further ahead.

Every head ends in a state for the target's own output layer, which is shared, so that a file of heads has few
parameters. Medusa heads (arXiv 2401.10774) predict several tokens from one state, each by a residual block of its own;
blockwise parallel decoding (arXiv 1811.03115) is the case of one candidate for each. An EAGLE head (arXiv 2401.15077)
is one transformer layer over states and the tokens that followed them, which predicts the next state and goes on from
its own predictions; it is trained as in EAGLE-3 (arXiv 2503.01840), on tokens alone and on its own predictions.

A file of heads is safetensors with the shape and the target's identity in its header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from outrider.artifacts import atomic_files
from outrider.core.errors import ModelRefused

HEAD_WIDTH = 64
"""Width of an attention head of the EAGLE layer."""
_MAX_BYTES = 4 << 30


class HeadsShape(BaseModel, frozen=True, extra="forbid"):
    """Says which heads a file holds."""

    kind: Literal["medusa", "eagle"] = "eagle"
    hidden: int = Field(ge=1, le=1 << 16)
    """H, the size of the target's hidden states."""
    depth: int = Field(default=6, ge=1, le=16)
    """The most tokens ahead of the session's last one that are predicted."""
    width: int = Field(default=256, ge=HEAD_WIDTH, le=1 << 14, multiple_of=HEAD_WIDTH)
    """D, the width of the EAGLE layer."""
    window: int = Field(default=64, ge=8, le=4096)
    """Number of positions that the EAGLE layer attends to, its own included."""


class MedusaHeads(nn.Module):
    """Predicts K tokens from one hidden state: head j the token j + 1 places after the state's own next token."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        blocks = [nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.depth)]
        self.blocks = nn.ModuleList(blocks)
        for block in blocks:
            nn.init.zeros_(block.weight)  # begins as the target's own prediction
            nn.init.zeros_(block.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the heads' states `[K, n, H]` for hidden states `[n, H]`."""
        return torch.stack([states + functional.silu(block(states)) for block in self.blocks])


class EagleHead(nn.Module):
    """Predicts the next hidden state from earlier ones and the tokens that followed them.

    Entry i of a sequence is the hidden state of position i and the embedding of the token at i + 1; the output is the
    state of position i + 1, from which the target's output layer gives the token at i + 2. The attention knows only
    distances, so entries have no positions.
    """

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        hidden, width = shape.hidden, shape.width
        self.shape = shape
        self.heads = width // HEAD_WIDTH
        # Embeddings are often far smaller than states, and would be learnt from late.
        self.state_norm, self.token_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.join = nn.Linear(2 * hidden, width, bias=False)
        self.attention_norm, self.mlp_norm, self.output_norm = (nn.RMSNorm(width, eps=1e-6) for _ in range(3))
        self.queries, self.keys, self.values = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.distances = nn.Parameter(torch.zeros(self.heads, shape.window))
        """`[heads, window]`: added to the attention's logits, by distance."""
        self.mix = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.output = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.down.weight)

    def entries(self, states: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the layer's input `[..., D]`, and its queries, keys and values `[..., heads, HEAD_WIDTH]`."""
        x = self.join(torch.cat((self.state_norm(states), self.token_norm(embeddings)), dim=-1))
        normed = self.attention_norm(x)
        split = (*x.shape[:-1], self.heads, HEAD_WIDTH)
        queries, keys, values = (layer(normed).view(split) for layer in (self.queries, self.keys, self.values))
        return x, queries, keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, distance: Tensor, seen: Tensor) -> Tensor:
        """Return the attention's result `[b, q, D]` of queries `[b, q, heads, w]` over entries `[b, k, heads, w]`.

        distance: int64, how many entries each query is behind each entry; it sees those of 0 to window - 1, if `seen`.
        Both have three dimensions and broadcast to `[b, q, k]`. Every query must see one entry, usually itself.
        """
        seen = seen & (distance >= 0) & (distance < self.shape.window)
        near = distance.clamp(0, self.shape.window - 1)
        bias = self.distances[:, near].transpose(0, 1).masked_fill(~seen[:, None], float("-inf"))
        scores = torch.einsum("bqhw,bkhw->bhqk", queries, keys) * HEAD_WIDTH**-0.5 + bias
        return torch.einsum("bhqk,bkhw->bqhw", scores.softmax(-1).to(values.dtype), values).flatten(-2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return predicted states `[..., H]` from the layer's input and its attention's result, `[..., D]` each."""
        x = x + self.mix(attended)
        normed = self.mlp_norm(x)
        x = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return self.output(self.output_norm(x))  # type: ignore[no-any-return]


Heads = MedusaHeads | EagleHead


def new_heads(shape: HeadsShape, seed: int = 0) -> Heads:
    """Return untrained heads, the same for the same shape and seed."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return MedusaHeads(shape) if shape.kind == "medusa" else EagleHead(shape)


class HeadsFile(BaseModel, frozen=True):
    """The header of a file of heads."""

    format: Literal["outrider-heads-1"] = "outrider-heads-1"
    target: str
    """The target's identity, "sha256:<hex>"."""
    shape: HeadsShape

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the header. Raises ModelRefused for a file that holds no heads."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ModelRefused(f"{path} has more than {_MAX_BYTES >> 30} GiB, which no file of heads needs")
            with safe_open(path, framework="pt") as file:
                return cls.model_validate_json((file.metadata() or {}).get("heads", "{}"))
        except (OSError, SafetensorError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise ModelRefused(
                f"{path} is no file of heads ({reason}); give one that outrider-distill wrote"
            ) from error


def save_heads(path: Path, heads: Heads, target: str) -> None:
    """Write heads in bfloat16, whole or not at all. target: identity of their target. Raises OSError."""
    header = HeadsFile(target=target, shape=heads.shape)
    tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in heads.state_dict().items()}
    atomic_files.write(path, save(tensors, {"heads": header.model_dump_json()}))


def load_heads(path: Path, target: str, hidden: int | None = None) -> Heads:
    """Return the heads in a file, in float32 on the CPU.

    target: identity of the target that they are for, "sha256:<hex>". hidden: size of its hidden states, if known.
    Raises ModelRefused for heads of another target, and for a damaged file.
    """
    header = HeadsFile.read(path)
    if header.target != target:
        raise ModelRefused(
            f"{path} has heads of target {header.target}, this one is {target}: train heads for this target with"
            " outrider-distill, or serve the other"
        )
    if hidden is not None and header.shape.hidden != hidden:
        raise ModelRefused(f"{path} has heads for states of {header.shape.hidden} values, the target's have {hidden}")
    heads = new_heads(header.shape)
    expected = heads.state_dict()
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(expected):
            wrong = sorted(set(file.keys()) ^ set(expected))
            raise ModelRefused(f"{path} is damaged: {', '.join(wrong[:3])} are missing or too many")
        found = {name: file.get_tensor(name) for name in expected}
    for name, value in found.items():
        if value.shape != expected[name].shape or not bool(value.float().isfinite().all()):
            raise ModelRefused(f"{path} is damaged: {name} has shape {tuple(value.shape)}, or is not finite")
    heads.load_state_dict({name: value.float() for name, value in found.items()})
    return heads.eval()


def describe_heads(path: Path) -> str:
    """Return a line about a file of heads, for logs."""
    header = HeadsFile.read(path)
    return f"{path.name}: {json.dumps(header.shape.model_dump())}, {path.stat().st_size / 1e6:.1f} MB"
