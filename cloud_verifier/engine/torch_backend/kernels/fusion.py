"""Replace small operators by fewer: parallel linear layers, and RMS norms.

Linear layers of one parent that read the same tensor (queries, keys and values; gate and up) become one product: on one
core of a Zen 4, one row through 512 x 1280 twice takes 0.49 ms, through 512 x 2560 once 0.38 ms. transformers' RMS norm
is eight operators: on that core one row of it takes 16 to 25 us, torch's own 7 us. On a GPU it is one triton kernel:
the 145 norms of a Qwen3 of 8B were half of its 2,000 kernels, and with joint products a forward pass of 16 rows takes
an H100 10 ms instead of 14.

Each replacement is compared with the module that it stands for; one that differs is not used. On a CPU bfloat16 keeps
transformers' own norms here; `layers` replaces those of whole layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cloud_verifier.engine.torch_backend.kernels.linear import agree, packable, packed_if_equal, plain

_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same tensor in most models; if they do not, the result is right but slower."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Greatest difference of each output of a norm to the module's own, relative to it: two steps of rounding."""


class _Joint:
    """Computes parallel layers at once and keeps the results until each of them was asked for."""

    def __init__(self, whole: Callable[[torch.Tensor], torch.Tensor], widths: Sequence[int]) -> None:
        self.whole = whole
        self._widths = list(widths)
        self._last: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the result `[..., out]` of the layer of this index for x `[..., in]`."""
        last = self._last
        if last is None or last[0] is not x:
            last = x, torch.split(self.whole(x), self._widths, dim=-1)
        self._last = None if index == len(self._widths) - 1 else last
        return last[1][index]


class ParallelLinear(nn.Module):
    """Stands for one of several linear layers that are computed as one; x `[..., in]` -> `[..., out]`, a view."""

    def __init__(self, linear: nn.Linear, joint: _Joint, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        """Shape and dtype, which some models ask for; it holds no values."""
        self.joint = joint
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joint.part(x, self._index)


class TritonRMSNorm(nn.Module):
    """Divides x `[..., n]` by its root mean square and multiplies it by `weight` `[n]`, in one kernel on a GPU.

    rounded: to x's dtype before the product with the weight, as in Llama.
    """

    def __init__(self, weight: torch.Tensor, eps: float, *, rounded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._rounded = rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from cloud_verifier.engine.torch_backend.kernels import triton_kernels  # where there is a GPU

        return triton_kernels.rms_norm(x, self.weight, self._eps, self._rounded)


@torch.inference_mode()
def fuse(module: nn.Module, *, triton: bool = False) -> int:
    """Replace what fewer operators can compute, before layers are packed; return the number of modules replaced.

    triton: for a model whose attention is in triton kernels. Otherwise layers that can be packed are joined, and norms
    replaced that are in float32 on a CPU.
    """
    # Only the parents are listed: a replaced layer's weights are to go before the next are joined.
    parents = [(one, names) for one in module.modules() for names in _PARALLEL if hasattr(one, names[0])]
    joined = sum(_fuse_linears(parent, names, triton=triton) for parent, names in parents)
    if joined and triton and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what was freed is in pieces, which serve nothing else
    children = [(parent, *named) for parent in module.modules() for named in parent.named_children()]
    return joined + sum(_fuse_norm(parent, name, child, triton=triton) for parent, name, child in children)


def _fuse_linears(parent: nn.Module, names: Sequence[str], *, triton: bool) -> int:
    """Join the children of these names, all or none; return the number of those joined."""
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    fits = plain if triton else packable
    if not all(isinstance(layer, nn.Module) and fits(layer) for layer in layers):
        return 0
    if len({(n.in_features, n.bias is None, n.weight.dtype, n.weight.device) for n in layers}) > 1:
        return 0
    if layers[0].weight.dtype not in _TOLERANCE:
        return 0
    product = _product(layers)
    whole = packed_if_equal(product) if not triton else product if agree(layers, product) else None
    if whole is None:
        return 0
    joint = _Joint(whole, [layer.out_features for layer in layers])
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, ParallelLinear(layer, joint, index))
    return len(layers)


def _product(layers: Sequence[Any]) -> nn.Linear:
    """Return one layer for all of these, which have the same inputs."""
    whole = nn.Linear(layers[0].in_features, sum(n.out_features for n in layers), layers[0].bias is not None, "meta")
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if whole.bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return whole


def _fuse_norm(parent: nn.Module, name: str, norm: Any, *, triton: bool) -> int:
    """Replace a norm whose weight is used as it is, or as 1 + weight (Gemma); return how many were replaced."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not (type(norm).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and isinstance(eps, float)):
        return 0
    # Some take a gate as well; those with a forward or hooks of their own do more.
    alone = len(inspect.signature(norm.forward).parameters) == 1 and "forward" not in vars(norm)
    fits = triton or (weight.dtype == torch.float32 and weight.device.type == "cpu")
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    if weight.ndim != 1 or weight.dtype not in _TOLERANCE or hooked or not (alone and fits):
        return 0
    weight = weight.detach()
    # Small rows show whether eps is used as it is here.
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1], [9], [eps], [0]])
    x = x.to(weight)
    expected = norm(x)
    made: list[nn.Module] = (
        [
            TritonRMSNorm(weight.clone(), eps, rounded=True),
            TritonRMSNorm(1.0 + weight.float(), eps, rounded=False),
            TritonRMSNorm(weight.clone(), eps, rounded=False),
        ]
        if triton
        else [_torch_norm(each, eps) for each in (weight.clone(), 1.0 + weight)]
    )
    least = 8.0 * torch.finfo(weight.dtype).smallest_normal

    def deviation(fused: nn.Module) -> float:
        got = fused(x)
        beyond = ((got.float() - expected.float()).abs() - least) / expected.float().abs().clamp_min(least)
        return float(beyond.max()) if got.dtype == expected.dtype else float("inf")

    nearest = min(made, key=deviation)
    if not deviation(nearest) <= _TOLERANCE[weight.dtype]:  # also if it is not a number
        return 0
    setattr(parent, name, nearest)
    return 1


def _torch_norm(weight: torch.Tensor, eps: float) -> nn.Module:
    norm = nn.RMSNorm(len(weight), eps, device="meta")
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm
