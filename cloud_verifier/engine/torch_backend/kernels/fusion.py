"""Replace small operators by fewer: parallel linear layers, and RMS norms.

Linear layers of one parent that read the same tensor (queries, keys and values; gate and up) become one product: on one
core of a Zen 4, one row through 512 x 1280 twice takes 0.49 ms, through 512 x 2560 once 0.38 ms. transformers' RMS norm
is eight operators. On that core one row of it takes 16 to 25 us; here, in four operators, 8 us. On a GPU it is one
kernel (`triton_norm`): the 145 norms of a Qwen3 of 8B were half of its 2,000 kernels, and with joint products a forward
pass of 16 rows takes an H100 10 ms instead of 14.

Each replacement is compared with the module that it stands for; one that differs is not used. On a CPU bfloat16 keeps
transformers' own norms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cloud_verifier.engine.torch_backend.kernels.linear import packable, packed_if_equal, plain

_PARALLEL = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same tensor in most models; if they do not, the result is right but slower."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Greatest difference of each output to the module's own, relative to it: two steps of rounding. Of a product, which
sums up, relative to the greatest output."""


class _Joint:
    """Computes parallel layers at once and keeps the results until each of them was asked for."""

    def __init__(self, whole: Callable[[torch.Tensor], torch.Tensor], widths: Sequence[int]) -> None:
        self._whole = whole
        self._widths = list(widths)
        self._last: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the result `[..., out]` of the layer of this index for x `[..., in]`."""
        last = self._last
        if last is None or last[0] is not x:
            last = x, torch.split(self._whole(x), self._widths, dim=-1)
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


class TritonRMSNorm(nn.Module):
    """Does the same in one kernel on a GPU. rounded: to x's dtype before the product with the weight, as in Llama."""

    def __init__(self, weight: torch.Tensor, eps: float, *, rounded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._rounded = rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from cloud_verifier.engine.torch_backend.kernels import triton_norm  # where there is a GPU

        return triton_norm.rms_norm(x, self.weight, self._eps, self._rounded)


@torch.inference_mode()
def fuse(module: nn.Module, *, triton: bool = False) -> int:
    """Replace what fewer operators can compute, before layers are packed; return the number of modules replaced.

    triton: for a model whose attention is in triton kernels. Otherwise only float32 on a CPU is replaced.
    """
    # Only the parents are listed: a replaced layer's weights are to go before the next are joined.
    parents = [(one, names) for one in module.modules() for names in _PARALLEL if hasattr(one, names[0])]
    joined = sum(_fuse_linears(parent, names, triton=triton) for parent, names in parents)
    if joined and triton and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what was freed is in pieces, which serve nothing else
    return joined + sum(_fuse_norm(one, name, triton=triton) for one, name in list(_norms(module, triton=triton)))


def _fuse_linears(parent: nn.Module, names: Sequence[str], *, triton: bool) -> int:
    """Join the children of these names, all or none; return the number of those joined."""
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    fits = plain if triton else packable
    if not all(isinstance(layer, nn.Module) and fits(layer) for layer in layers):
        return 0
    if len({(n.in_features, n.bias is None, n.weight.dtype, n.weight.device) for n in layers}) > 1:
        return 0
    if layers[0].weight.dtype not in (_TOLERANCE if triton else (torch.float32,)):
        return 0
    product = _product(layers)
    whole = product if triton else packed_if_equal(product)
    if whole is None:
        return 0
    joint = _Joint(whole, [layer.out_features for layer in layers])
    if triton and not _equal(layers, product):
        return 0
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, ParallelLinear(layer, joint, index))
    return len(layers)


def _equal(layers: Sequence[Any], product: nn.Linear) -> bool:
    """Return whether the product's parts are what the layers give."""
    weight = product.weight
    x = torch.randn(4, product.in_features, generator=torch.Generator().manual_seed(0)).to(weight)
    expected = torch.cat([layer(x) for layer in layers], dim=-1).float()
    difference = (product(x).float() - expected).abs().max()
    return bool(difference <= _TOLERANCE[weight.dtype] * expected.abs().max())


def _product(layers: Sequence[Any]) -> nn.Linear:
    """Return one layer for all of these, which have the same inputs."""
    whole = nn.Linear(layers[0].in_features, sum(n.out_features for n in layers), layers[0].bias is not None, "meta")
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if whole.bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return whole


def _norms(module: nn.Module, *, triton: bool) -> Iterator[tuple[nn.Module, str]]:
    """Yield (parent, name) of the modules that by their name and arguments are RMS norms with a weight."""
    for parent in module.modules():
        for name, child in parent.named_children():
            weight = getattr(child, "weight", None)
            if type(child).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and weight.ndim == 1:
                # Others take a gate as well, or have a forward or hooks that add the parts of several ranks.
                plain = len(inspect.signature(child.forward).parameters) == 1 and "forward" not in vars(child)
                hooked = child._forward_hooks or child._forward_pre_hooks
                fits = triton or (weight.dtype == torch.float32 and weight.device.type == "cpu")
                if plain and not hooked and fits and weight.dtype in _TOLERANCE:
                    yield parent, name


def _fuse_norm(parent: nn.Module, name: str, *, triton: bool) -> int:
    """Replace a norm whose weight is used as it is, or as 1 + weight (Gemma); return how many were replaced."""
    norm: Any = getattr(parent, name)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        return 0
    # Small rows show whether eps is used as it is here.
    weight = norm.weight.detach()
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
        else [FusedRMSNorm(each.clone(), eps) for each in (weight, 1.0 + weight)]
    )
    tolerance, least = _TOLERANCE[weight.dtype], 8.0 * torch.finfo(weight.dtype).smallest_normal
    found: list[tuple[float, int, nn.Module]] = []
    for fused in made:
        got = fused(x)
        beyond = ((got.float() - expected.float()).abs() - least) / expected.float().abs().clamp_min(least)
        if got.dtype == expected.dtype and float(beyond.max()) <= tolerance:
            found.append((float(beyond.max()), len(found), fused))
    if found:
        setattr(parent, name, min(found)[2])
    return len(found[:1])
