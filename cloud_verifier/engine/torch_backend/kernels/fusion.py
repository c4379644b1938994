"""Replace small operators of a float32 model on a CPU by fewer: parallel linear layers and RMS norms.

Linear layers of one parent that read the same tensor (queries, keys and values; gate and up) become one product: on one
core of a Zen 4, one row through 512 x 1280 twice takes 0.49 ms, through 512 x 2560 once 0.38 ms. transformers' RMS norm
of one row is eight operators and 16 to 25 us, here it is four and 8 us. Each replacement is compared with the module
that it stands for; one that differs is not used. `exact` attention and bfloat16 keep transformers' own operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cloud_verifier.engine.torch_backend.kernels.linear import PackedLinear, packable, packed_if_equal

_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same tensor in most models; if they do not, the result is right but slower."""
_NORM_TOLERANCE = 1e-5
"""Greatest difference to the module's own norm, relative to its greatest output; rounding gives 3e-7."""


class _Joint:
    """Computes parallel layers at once and keeps the results until each of them was asked for."""

    def __init__(self, packed: PackedLinear, widths: Sequence[int]) -> None:
        self._packed = packed
        self._widths = list(widths)
        self._last: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the result `[..., out]` of the layer of this index for x `[..., in]`."""
        last = self._last
        if last is None or last[0] is not x:
            last = x, self._packed(x).split(self._widths, dim=-1)
        self._last = None if index == len(self._widths) - 1 else last
        return last[1][index]


class ParallelLinear(nn.Module):
    """Stands for one of several linear layers that are computed as one; x `[..., in]` -> `[..., out]`, a view."""

    def __init__(self, linear: nn.Linear, joint: _Joint, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        """Shape and dtype, which some models ask for; it holds no values."""
        self._joint = joint
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._joint.part(x, self._index)


class FusedRMSNorm(nn.Module):
    """Divides x `[..., n]` by its root mean square and multiplies it by `weight` `[n]`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = torch.full((1,), eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight)


@torch.inference_mode()
def fuse(module: nn.Module) -> int:
    """Replace what fewer operators can compute, before layers are packed; return the number of modules replaced."""
    return sum(_fuse_linears(parent, names) for parent in list(module.modules()) for names in _PARALLEL) + sum(
        _fuse_norm(parent, name) for parent, name in list(_norms(module))
    )


def _fuse_linears(parent: nn.Module, names: Sequence[str]) -> int:
    """Join the children of these names, all or none; return the number of those joined."""
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    if not all(isinstance(layer, nn.Module) and packable(layer) for layer in layers):
        return 0
    if layers[0].weight.dtype != torch.float32 or len({(n.in_features, n.bias is None) for n in layers}) > 1:
        return 0
    widths = [layer.out_features for layer in layers]
    whole = nn.Linear(layers[0].in_features, sum(widths), bias=layers[0].bias is not None, device="meta")
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if whole.bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    if (packed := packed_if_equal(whole)) is None:
        return 0
    joint = _Joint(packed, widths)
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, ParallelLinear(layer, joint, index))
    return len(layers)


def _norms(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (parent, name) of the modules that by their name and arguments are RMS norms with a weight."""
    for parent in module.modules():
        for name, child in parent.named_children():
            weight = getattr(child, "weight", None)
            if type(child).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and weight.ndim == 1:
                # Others take a gate as well, or have a forward or hooks that add the parts of several ranks.
                plain = len(inspect.signature(child.forward).parameters) == 1 and "forward" not in vars(child)
                hooked = child._forward_hooks or child._forward_pre_hooks
                if plain and not hooked and weight.dtype == torch.float32 and weight.device.type == "cpu":
                    yield parent, name


def _fuse_norm(parent: nn.Module, name: str) -> int:
    """Replace a norm whose weight is used as it is, or as 1 + weight (Gemma); return how many were replaced."""
    norm: Any = getattr(parent, name)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        return 0
    # Small rows show whether eps is used as it is here.
    x = torch.randn(4, len(norm.weight), generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1], [9], [eps], [0]]
    )
    expected = norm(x)
    for weight in (norm.weight, 1.0 + norm.weight):
        fused = FusedRMSNorm(weight.detach().clone(), eps)
        if float((fused(x) - expected).abs().max()) <= _NORM_TOLERANCE * float(expected.abs().max()):
            setattr(parent, name, fused)
            return 1
    return 0
