"""Compute attention so that a row's bits do not depend on the rows beside it: the backend `exact`.

A row's keys are its sequence in order of position, cut into blocks at multiples of BLOCK; a node's ancestors have the
positions that they would have in a linear sequence. Each block gives one product in float32, its shape fixed for the
model; keys that a row does not see have a weight of exactly 0. A row's partial results are then added in order of
position. So nothing in a row's arithmetic depends on the batch, on the chunks of the sequence or on other branches.

Blocks of the prefix and the chain serve all rows of a segment. Those that reach into the tree are gathered once per
leaf, and a node is computed on the path of one of the leaves below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.torch_backend.batch import Ints, Segment
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan, Scoring
from cloud_verifier.engine.torch_backend.kernels.linear import TILE
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, Slots

BLOCK = 64
"""Number of keys in one product."""
QUERIES = 16
"""The most query rows in one product, over tokens and the query heads that share a key head."""
AT_ONCE = 256
"""Products whose keys and values are gathered at once; bounds memory on a long prefill."""
LOWEST = -1e30
"""Maximum of a row that sees no key of a block; -inf would make -inf - -inf."""


class ExactBackend:
    """Computes attention as products of fixed shapes in float32, on any device."""

    name = "exact"
    row_tile = TILE
    """With whole tiles, of linear layers too, elementwise kernels process whole vectors only."""

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        return _ExactPlan(segments, pool)


_Product = tuple[Ints, int, Slots]
"""The queries of some tokens by one block of keys: (rows of the step `[<= tile]`, number of the block, slots
`[<= BLOCK]` of the positions from `block * BLOCK` on)."""


@dataclass(frozen=True)
class _Layout:
    """Index tensors that layers with the same window and heads share; P products, each once per key head."""

    queries: torch.Tensor
    """`[P, Hkv, tile * groups]`: rows of queries, flattened over (token, query head)."""
    keys: torch.Tensor
    """`[P, Hkv, BLOCK]`: rows of keys and values, flattened over (slot, key head)."""
    mask: torch.Tensor
    """`[P, 1, tile, 1, BLOCK]`, added to the scores."""
    parts: torch.Tensor
    """`[N, T, Hq]`: up to N partial results of every row, in order of position."""
    absent: torch.Tensor
    """`[N, T, 1]`, added to the maxima of the parts: -inf where a row has fewer than N."""


class _ExactPlan:
    def __init__(self, segments: Sequence[Segment], pool: KVPool) -> None:
        self.pool = pool
        self._segments = segments
        self._device = pool.keys[0].device
        self._written = self._tensor(np.concatenate([segment.slots for segment in segments]))
        self._positions: Ints = np.concatenate([segment.positions for segment in segments])
        self._layouts: dict[tuple[int | None, int, int, int], _Layout] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        count = len(self._positions)  # rows beyond it are padding
        keys.index_copy_(0, self._written, key[0].transpose(0, 1)[:count])
        values.index_copy_(0, self._written, value[0].transpose(0, 1)[:count])
        _, heads, tokens, _ = query.shape
        layout = self._layout(scoring.window, tokens, heads, key.shape[1])
        scaled = query[0].transpose(0, 1).float() * scoring.scale
        pieces = []
        for first in range(0, len(layout.mask), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            q = _rows(scaled, layout.queries[some])
            k, v = _rows(keys, layout.keys[some]), _rows(values, layout.keys[some])
            pieces.append(_multiply(q, k, v, layout.mask[some], scoring))
        greatest, sums, outs = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        out = _combine(greatest, sums, outs, layout, scoring.sinks)
        return out[None].to(query.dtype)

    def _layout(self, window: int | None, tokens: int, heads: int, kv_heads: int) -> _Layout:
        key = (window, tokens, heads, kv_heads)
        if (known := self._layouts.get(key)) is not None:
            return known
        groups = heads // kv_heads
        tile = max(1, QUERIES // groups)
        products: list[_Product] = []
        first = 0
        for segment in self._segments:
            products += _products_of(segment, first, tile, window)
            first += segment.rows
        rows = np.stack([_filled(rows, tile) for rows, _, _ in products])
        slots = np.stack([_filled(slots, BLOCK) for _, _, slots in products])
        blocks = np.array([block for _, block, _ in products])
        head = np.arange(heads)
        queries = rows[:, None, :, None] * heads + head.reshape(kv_heads, 1, groups)
        keys = slots[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]
        parts, present = _parts(products, tile, tokens, len(self._positions))
        product, place = np.divmod(parts[..., None], tile)
        seen = _seen(self._positions[rows], blocks, window)
        layout = self._layouts[key] = _Layout(
            self._tensor(queries.reshape(len(products), kv_heads, -1)),
            self._tensor(keys),
            self._additive(seen[:, None, :, None]),
            self._tensor(((product * kv_heads + head // groups) * tile + place) * groups + head % groups),
            self._additive(present[..., None]),
        )
        return layout

    def _tensor(self, index: Ints | Slots) -> torch.Tensor:
        return torch.from_numpy(index.astype(np.int64)).to(self._device)

    def _additive(self, seen: NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(self._device)


def _products_of(segment: Segment, first: int, tile: int, window: int | None) -> Iterator[_Product]:
    """Yield the products of a segment whose first row is `first` in the step; each row's blocks come in order."""
    trunk = np.concatenate([segment.prefix, segment.slots[: segment.chain]])
    shared = len(trunk) // BLOCK
    spans = [(np.arange(segment.rows), trunk, 0, shared)]
    for rows, slots in _paths(segment):
        below = rows[segment.positions[rows] >= shared * BLOCK]
        whole = np.concatenate([trunk, slots])
        spans.append((below, whole, shared, -(-len(whole) // BLOCK)))
    for rows, slots, start, end in spans:
        for chosen in (rows[i : i + tile] for i in range(0, len(rows), tile)):
            positions = segment.positions[chosen]
            # Keys outside of every row's window would add exactly 0.
            low = 0 if window is None else max(0, int(positions.min()) - window + 1) // BLOCK
            for block in range(max(start, low), min(end, int(positions.max()) // BLOCK + 1)):
                yield chosen + first, block, slots[block * BLOCK : (block + 1) * BLOCK]


def _paths(segment: Segment) -> Iterator[tuple[Ints, Slots]]:
    """Yield for every leaf the rows computed on its path, each row once, and the slots of the path's nodes."""
    taken = np.zeros(segment.rows, dtype=np.bool_)
    inner = set(segment.parents.tolist())
    for leaf in range(segment.chain - 1, segment.rows):
        if leaf in inner:
            continue
        path = []
        row = leaf
        while row >= segment.chain:
            path.append(row)
            row = int(segment.parents[row - segment.chain])
        path.reverse()
        rows = np.array([*range(segment.chain), *path])
        yield rows[~taken[rows]], segment.slots[path]
        taken[rows] = True


def _filled(values: Ints | Slots, size: int) -> Ints:
    """Pad to `size` with the last value: another session's slot might hold values that are not finite."""
    return np.concatenate([values, np.repeat(values[-1:], size - len(values))]).astype(np.int64)


def _seen(positions: Ints, blocks: Ints, window: int | None) -> NDArray[np.bool_]:
    """Return which keys each row sees: positions `[P, tile]`, blocks `[P]` -> `[P, tile, BLOCK]`."""
    keys = (blocks[:, None] * BLOCK + np.arange(BLOCK))[:, None, :]
    seen: NDArray[np.bool_] = keys <= positions[..., None]
    return seen if window is None else seen & (keys > positions[..., None] - window)


def _parts(products: Sequence[_Product], tile: int, tokens: int, count: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Return `[N, T]`, per row `product * tile + place in its tile` in order of position, and whether there is one.

    Where a row has fewer than N, its first one is repeated; padding repeats the last row's.
    """
    table: Ints = np.full((max(block for _, block, _ in products) + 1, tokens), -1, dtype=np.int64)
    have = np.zeros(tokens, dtype=np.int64)
    for number, (rows, _, _) in enumerate(products):
        table[have[rows], rows] = number * tile + np.arange(len(rows))
        have[rows] += 1
    table[:, count:] = table[:, count - 1 : count]
    table = table[: have.max()]
    present: NDArray[np.bool_] = table >= 0
    return np.where(present, table, table[0]), present


def _rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather rows as float32: source `[tokens or slots, heads, D]`, index `[P, Hkv, m]` -> `[P * Hkv, m, D]`."""
    return source.flatten(0, 1).index_select(0, index.flatten()).float().view(-1, index.shape[2], source.shape[2])


def _multiply(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the greatest score and the sum of weights relative to it, `[P * Hkv, m]`, and the weighted values,
    `[P * Hkv, m, Dv]`."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    products, _, tile, _, keys = mask.shape
    scores.view(products, -1, tile, q.shape[1] // tile, keys).add_(mask)
    greatest = scores.amax(dim=2).clamp_(min=LOWEST)
    weights = scores.sub_(greatest[..., None]).exp_()
    return greatest, weights.sum(dim=2), torch.bmm(weights, v)


def _combine(
    greatest: torch.Tensor, sums: torch.Tensor, values: torch.Tensor, layout: _Layout, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Add the parts of every row in order of position; returns `[T, Hq, Dv]`.

    Product and sum are separate operations: fused in one kernel and not in another they would round differently.
    """
    parts = layout.parts.flatten()
    shape = layout.parts.shape
    maxima = greatest.flatten().index_select(0, parts).view(shape) + layout.absent
    top = maxima.amax(dim=0)
    if sinks is not None:
        top = torch.maximum(top, sinks.float())
    factors = (maxima - top).exp_()
    weights = sums.flatten().index_select(0, parts).view(shape) * factors
    outs = values.flatten(0, 1).index_select(0, parts).view(*shape, -1) * factors[..., None]
    weight, out = weights[0], outs[0]
    for n in range(1, shape[0]):
        weight += weights[n]
        out += outs[n]
    if sinks is not None:
        weight = weight + (sinks.float() - top).exp_()
    return out / weight[..., None]
