"""Compute RMS norms in one triton kernel each, which as torch's own operators are eight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, weight, out, eps, inner, outer_stride, inner_stride, N: tl.constexpr, PAD: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Write one row's norm; grid (rows). ROUNDED: to x's dtype before it is multiplied by the weight."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD)
    there = place < N
    begin = x + row // inner * outer_stride + row % inner * inner_stride
    v = tl.load(begin + place, mask=there, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / N + eps)
    if ROUNDED:
        v = v.to(x.dtype.element_ty).to(tl.float32)
    v = v * tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * N + place, v.to(out.dtype.element_ty), mask=there)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounded: bool) -> torch.Tensor:
    """Return x `[..., m, n]` divided by its root mean square, times weight `[n]`: contiguous, in the dtype that torch
    gives their product."""
    inner, n = x.shape[-2:]
    if x.stride(-1) != 1 or any(size != 1 for size in x.shape[:-3]):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.result_type(x, weight) if rounded else x.dtype, device=x.device)
    strides = x.stride(-3) if x.ndim > 2 else 0, x.stride(-2)
    pad = triton.next_power_of_2(n)
    with torch.cuda.device_of(x):  # triton launches on the current device
        rms_norm_kernel[(x.numel() // n,)](
            x, weight, out, eps, inner, *strides, n, pad, rounded, num_warps=max(1, min(16, pad // 256))
        )
    return out
