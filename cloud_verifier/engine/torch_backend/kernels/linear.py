"""Replace a model's linear layers on a CPU: packed once for oneDNN, in int8, or in tiles of a fixed number of rows.

torch's own float32 linear (MKL) is made for many rows: on one core of a Zen 4, 22M parameters, 1 / 3 / 5 / 8 rows take
8 / 15 / 13 / 13 ms. With packed weights they take 6.5 / 6 / 5.5 / 7.5 ms, and a row's bits do not depend on the rows
beside it, which MKL's do below four. bfloat16 gains as much; there, with AMX, the bits differ from 33 rows on, since
oneDNN chooses its kernel by the shape. With `exact` attention every product of such a layer has TILE rows, however many
the step has.

An output layer that only proposes tokens need not be exact, and reads its weights for a few rows at a time: in int8 it
reads a quarter of the bytes. On one core with AVX2, 1 / 4 rows through 512 x 8,192 take 0.14 / 0.25 ms, packed float32
0.86 ms. In small layers nothing is gained, since x has to be quantized first.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.functional import pad

from cloud_verifier.engine.torch_backend.kernels import operators

log = logging.getLogger(__name__)

TILE = 16
"""Number of rows in one product; exact attention pads steps to a multiple of it. The shipped target in bfloat16 on one
core, a step of 1 / 64 / 512 rows in ms: with AMX 10.4 / 23 / 229, in tiles of 32 11.6 / 20 / 206, whole 10.4 / 16 /
162; with AVX-512 alone 18 / 46 / 506, in tiles of 32 25 / 43 / 482, whole 18 / 39 / 444."""
_HINT_ROWS = 16
"""Rows that the packed layout is made for; the best choice measured from 1 to 128 rows."""
PADDED_ROWS = 4
"""Rows to which fewer are padded where that pays."""
LEAST_ROWS = PADDED_ROWS if "AVX512" in torch.backends.cpu.get_cpu_capability() else 1
"""Fewer rows are padded to these; a step as a whole, so that layers need not pad. With AVX-512 four are computed faster
than one. With AVX2, whose rows have the same bits either way, 1 / 2 / 3 rows of the shipped target take 14.3 / 14.1 /
16.4 ms on one core, and padded 16.9 / 18.2 / 19.0."""
_ROW_BLOCK = 16
"""More rows are padded to multiples of this, up to four times as many to multiples of half of it, beyond sixteen times
as many to multiples of its double. oneDNN keeps a primitive of 1 to 5 MB for every shape, up to 1,024 shapes: five
layers at every number of rows from 8 to 512 took 4.4 GB, padded 0.3 GB, in the same time."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Greatest difference to torch's own linear, relative to its greatest output."""
_INT8 = 127
_INT8_TOLERANCE = 0.05
"""The same for int8, where rounding gives about 0.03."""

# What torch's inductor uses for frozen weights. Not public, so it may be missing; results are checked before use.
_pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


_numbers = itertools.count()
_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
"""Every layer that lives, by its number."""


class PackedLinear(nn.Module):
    """Replaces nn.Linear for inference on a CPU; x `[..., in]` -> `[..., out]`.

    torch.compile does not look into it, since it knows no packed weights: there it is one operator.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.weight = torch.empty_like(linear.weight, device="meta")
        """Shape and dtype, which some models ask for; it holds no values."""
        self._bias = linear.bias
        self._packed = _pack(linear.weight.detach().contiguous(), _HINT_ROWS)
        self._number = next(_numbers)
        _layers[self._number] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            compiled: torch.Tensor = _packed_linear(x, self._number)
            return compiled
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if (padded := _padded(count)) > count:
            rows = pad(rows, (0, 0, 0, padded - count))
        out: torch.Tensor = _linear(rows, self._packed, self._bias, "none", [], "")
        if padded > count:
            out = out[:count]
        return out.reshape(*x.shape[:-1], self.out_features)


_packed_linear = operators.define(
    "packed_linear(Tensor x, int number) -> Tensor",
    lambda x, number: _layers[number](x),
    lambda x, number: x.new_empty(*x.shape[:-1], _layers[number].out_features),
)


class Int8Linear(nn.Module):
    """Replaces nn.Linear where a result may be off by some per cent; float32 x `[..., in]` -> `[..., out]`.

    Every output has a scale for its weights, and every x one for its values. Raises RuntimeError on processors for
    which torch has no such product.
    """

    def __init__(self, layer: nn.Module, width: int) -> None:
        """Take a layer that is linear, whatever its class, of `width` inputs."""
        super().__init__()
        bias = layer(torch.zeros(1, width))[0]
        weight = (layer(torch.eye(width)) - bias).t().contiguous()
        scales = (weight.abs().amax(1) / _INT8).clamp_min(torch.finfo(torch.float32).tiny).double()
        none = torch.zeros(len(scales), dtype=torch.int64)
        with warnings.catch_warnings(action="ignore"):  # torch will remove these operators: see int8_if_close
            quantized = torch.quantize_per_channel(weight, scales, none, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias if bias.any() else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Without VNNI the sum of two products of 8 bits saturates; x has 7.
        out: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, reduce_range=True)
        return out


class TiledLinear(nn.Module):
    """Computes a linear layer in tiles of TILE rows; x `[..., in]` -> `[..., out]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if missing := -count % TILE:
            rows = pad(rows, (0, 0, 0, missing))
        out = self.layer(rows) if count <= TILE else torch.cat([self.layer(tile) for tile in torch.split(rows, TILE)])
        return out[:count].reshape(*x.shape[:-1], out.shape[-1])


@torch.inference_mode()
def pack_linears(module: nn.Module) -> int:
    """Replace the linear layers that can be packed, each checked against torch's own; returns how many."""
    if _pack is None or _linear is None:
        return 0

    found, packed = _replace(module, packable, packed_if_equal)
    if packed < found:
        log.warning("%d of %d linear layers cannot be packed and stay as they are", found - packed, found)
    return packed


@torch.inference_mode()
def int8_if_close(layer: nn.Module, width: int) -> Int8Linear | None:
    """Return a float32 linear layer of `width` inputs in int8; None if this version of torch has no such product for
    this processor, or one that computes something else."""
    try:
        quantized = Int8Linear(layer, width)
        return quantized if _close(quantized, layer, width, torch.float32, _INT8_TOLERANCE) else None
    except (RuntimeError, AttributeError) as error:
        log.info("a layer of %d inputs stays in float32: %s", width, str(error).splitlines()[0])
        return None


def tile_linears(module: nn.Module, *others: type[nn.Module]) -> int:
    """Wrap linear layers, and layers of type `others`, whose bits may depend on the number of rows; returns how many.

    Packed float32 layers are left as they are: oneDNN gives a row the same bits up to 1,024 rows, with AVX2 and with
    AVX-512, and in tiles the shipped target's step of 512 rows would take 1.3 times as long, one of 64 rows 1.4 times.
    """

    def depends_on_rows(layer: nn.Module) -> bool:
        packed_float32 = isinstance(layer, PackedLinear) and layer.dtype == torch.float32
        return isinstance(layer, (nn.Linear, PackedLinear, *others)) and not packed_float32

    return _replace(module, depends_on_rows, TiledLinear)[1]


def plain(layer: nn.Module) -> bool:
    """Return whether a layer is a linear one, and no more than that."""
    # A layer whose forward was replaced, or one with hooks, does more: a sharded one adds the ranks' parts together.
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not hooked


def packable(layer: nn.Module) -> bool:
    """Return whether a layer is a plain linear one on a CPU, of a dtype that can be packed."""
    known = _pack is not None and _linear is not None
    return plain(layer) and known and layer.weight.dtype in _TOLERANCE and layer.weight.device.type == "cpu"


def _replace(
    module: nn.Module, chosen: Callable[[nn.Module], bool], replacement_of: Callable[[Any], nn.Module | None]
) -> tuple[int, int]:
    """Replace the chosen layers but those for which there is no replacement; return (chosen, replaced)."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, TiledLinear)
        for name, child in parent.named_children()
        if chosen(child)
    ]
    replaced = 0
    for parent, name, layer in found:
        if (replacement := replacement_of(layer)) is not None:
            setattr(parent, name, replacement)
            replaced += 1
    return len(found), replaced


def packed_if_equal(linear: nn.Linear) -> PackedLinear | None:
    """Return the packed layer; None if this processor's oneDNN refuses it or computes something else."""
    try:
        packed = PackedLinear(linear)
        return packed if _agrees(packed, linear) else None
    except RuntimeError as error:
        log.info("oneDNN does not pack a layer of %s: %s", tuple(linear.weight.shape), error)
        return None


def _agrees(packed: PackedLinear, linear: nn.Linear) -> bool:
    return _close(packed, linear, linear.in_features, linear.weight.dtype, _TOLERANCE[linear.weight.dtype])


def _close(new: nn.Module, old: nn.Module, width: int, dtype: torch.dtype, tolerance: float) -> bool:
    """Return whether two layers of `width` inputs differ by at most `tolerance`, relative to the greatest output."""
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = old(x)
    return float((new(x) - expected).abs().max()) <= tolerance * float(expected.abs().max())


def _padded(rows: int) -> int:
    """Return the number of rows that is computed for so many."""
    if rows <= _ROW_BLOCK:
        return max(rows, LEAST_ROWS)
    block = _ROW_BLOCK // 2 if rows <= 4 * _ROW_BLOCK else _ROW_BLOCK if rows <= 16 * _ROW_BLOCK else 2 * _ROW_BLOCK
    return -(-rows // block) * block
