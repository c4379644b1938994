"""Find, in triton kernels, the token of the greatest log p + g in each row of logits, and how many come before it.

Scores are float32, so a token is certain only if it leads by more than their errors; the caller decides that. g is
computed from the same 64-bit hash as in outrider.core.coupling.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in triton's interpreter, on CPU tensors."""

BLOCK = 1024
"""Tokens of one program."""
LOG2E = tl.constexpr(1.4426950408889634)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _gumbel(ids, key):
    """Return g of tokens, float32, within 1e-5: ids are uint64, as is the position's key."""
    x = ids * GOLDEN + key
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    u = ((x >> 11).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    # Near 1, u itself has too few bits left: -log(1 - w) = w + w^2 / 2 + w^3 / 3 + ...
    w = ((0x1FFFFFFFFFFFFF - (x >> 11)).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    series = w * (1.0 + w * (0.5 + w * (0.33333333 + w * (0.25 + w * 0.2))))
    return -tl.log(tl.where(w < 0.03125, series, -tl.log(u)))


@triton.jit
def race_kernel(
    logits, keys_of_positions, inverses, bests, ids, seconds, tops, width, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write, of one block of a row, the best score, its token, the second best score and the greatest logit, or NaN.

    Grid (rows, blocks). inverses: 1 / temperature of each row.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    places = tl.arange(0, BLOCK)
    v = tl.program_id(1) * BLOCK + places
    x = tl.load(logits + row * width + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    noise = _gumbel(v.to(tl.uint64), tl.load(keys_of_positions + row).to(tl.uint64, bitcast=True))
    scores = x * tl.load(inverses + row) + noise
    best, place = tl.max(scores, axis=0, return_indices=True)
    broken = tl.sum((x != x).to(tl.int32), axis=0)
    tl.store(bests + at, best)
    tl.store(ids + at, tl.program_id(1) * BLOCK + place)
    tl.store(seconds + at, tl.max(tl.where(places == place, float("-inf"), scores), axis=0))
    tl.store(tops + at, tl.where(broken > 0, float("nan"), tl.max(x, axis=0)))


@triton.jit
def rank_kernel(
    logits, tokens, inverses, tops, slacks, before, near, masses, totals, width, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write, of one block of a row, the tokens before the row's token by likelihood and then id, and their probability.

    Grid (rows, blocks). before, near: numbers of tokens before it, and of those so near that rounding may order them
    otherwise. masses, totals: sums of exp((x - top) / T) over the tokens before it, and over all.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * width + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    token = tl.load(tokens + row)
    own = tl.load(logits + row * width + token).to(tl.float32)
    first = (x > own) | ((x == own) & (v < token))
    beside = (x != own) & (tl.abs(x - own) <= tl.load(slacks + row))
    weights = tl.exp2((x - tl.load(tops + row)) * (tl.load(inverses + row) * LOG2E))
    tl.store(before + at, tl.sum(first.to(tl.int32), axis=0))
    tl.store(near + at, tl.sum(beside.to(tl.int32), axis=0))
    tl.store(masses + at, tl.sum(tl.where(first, weights, 0.0), axis=0))
    tl.store(totals + at, tl.sum(weights, axis=0))


def race(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, slack: float) -> NDArray[np.float64]:
    """Return the winner of each row and what is known of it, `[7, R]`, in one copy from the device.

    These are the token; its lead to the second best score in nats; the row's greatest logit, NaN if a logit is; the
    token's own logit; the number of tokens that are more likely, or as likely with a smaller id; the number of other
    tokens that are near, but not equal; and the probability of those more likely ones, before any filter.
    logits: `[R, V]`. keys: of the rows' positions, int64 with the bits of the uint64. temperatures: float32.
    slack: nats between two tokens that count as near.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    grid, shape = (rows, blocks), (rows, blocks)
    width, inverses = logits.stride(0), temperatures.reciprocal()
    bests, seconds, tops, masses, totals = logits.new_empty((5, *shape), dtype=torch.float32)
    ids, before, near = logits.new_empty((3, *shape), dtype=torch.int32)
    with torch.cuda.device_of(logits):  # triton launches on the current device
        race_kernel[grid](logits, keys, inverses, bests, ids, seconds, tops, width, vocabulary, BLOCK)
        best, block = bests.max(dim=1, keepdim=True)
        second = torch.maximum(seconds.gather(1, block), bests.scatter(1, block, -torch.inf).amax(dim=1, keepdim=True))
        tokens = ids.gather(1, block).long()
        top = tops.amax(dim=1)
        slacks = slack * temperatures
        rank_kernel[grid](logits, tokens, inverses, top, slacks, before, near, masses, totals, width, vocabulary, BLOCK)
    columns = (
        tokens[:, 0],
        (best - second)[:, 0],
        top,
        logits.gather(1, tokens)[:, 0],
        before.sum(dim=1),
        near.sum(dim=1),
        masses.sum(dim=1) / totals.sum(dim=1),
    )
    found: NDArray[np.float64] = torch.stack([column.double() for column in columns]).cpu().numpy()
    return found
