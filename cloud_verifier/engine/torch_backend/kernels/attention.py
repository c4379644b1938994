"""Define the Protocol of attention backends over KV slots, and implement the portable one, `sdpa`.

A backend plans a step once; the plan then serves every layer. The `sdpa` plan writes the rows' keys and values to their
slots, gathers each segment's prefix and rows in one index_select, and runs one attention call per segment, so that
nothing is padded. Query heads that share a key head are folded into query rows where rows are few: one row of a model
with eight query heads and two key heads becomes two batches of four rows, and the keys are not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool

FOLD_ROWS = 32
"""The most rows that are folded: above, folding gains nothing, and its mask, repeated per group, would grow large."""


@dataclass(frozen=True)
class Scoring:
    """Parameters by which a layer turns products of queries and keys into weights, as the model passes them."""

    scale: float
    window: int | None = None
    """A row at position p sees keys at positions greater than p - window."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)` (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """`[query heads]`: the score of a key that every row sees and that has no value (gpt-oss)."""


class AttentionPlan(Protocol):
    """One step's index tensors and masks, which serve every layer.

    pool: holds the keys and values of the step's sessions.
    """

    pool: KVPool

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Write the rows' keys and values to their slots and return the attention of the rows.

        query `[1, Hq, T, Dk]`, key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`.
        """


class AttentionBackend(Protocol):
    """Computes attention over the pool.

    row_tile: forward passes are padded to a multiple of so many rows.
    """

    name: str
    row_tile: int

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        """Build the index tensors and masks of one step."""


class SdpaBackend:
    """Computes attention, as the reference, with torch's scaled_dot_product_attention, on any device."""

    name = "sdpa"
    row_tile = 1

    def __init__(self) -> None:
        self._scratch: dict[tuple[object, ...], torch.Tensor] = {}

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        return _SdpaPlan(segments, pool, self)

    def gathered(self, kind: str, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return `source[index]` in a buffer that grows, and that the next layer of the same shape overwrites."""
        rows = index.shape[0]
        like = (kind, source.shape[1], source.shape[2], source.dtype, source.device)
        buffer = self._scratch.get(like)
        if buffer is None or buffer.shape[0] < rows:
            buffer = source.new_empty((max(1024, 2 * rows), *source.shape[1:]))
            self._scratch[like] = buffer
        return torch.index_select(source, 0, index, out=buffer[:rows])


@dataclass(frozen=True)
class _Span:
    """A segment's share of a step: rows `[row, row + rows)` see keys `[key, key + keys)` of those gathered."""

    row: int
    rows: int
    key: int
    keys: int
    mask: torch.Tensor | None
    """`[rows, keys]` to add to the scores; None if every row sees every key."""
    folded: torch.Tensor | None
    """The mask once per query head of a group, `[groups * rows, keys]`."""


_Layout = tuple[torch.Tensor, tuple[_Span, ...]]
"""Tables that layers with the same window share: slots to gather, int32 `[sum of keys]`, and a span per segment."""


class _SdpaPlan:
    def __init__(self, segments: Sequence[Segment], pool: KVPool, backend: SdpaBackend) -> None:
        self.pool = pool
        self._segments = segments
        self._backend = backend
        slots = np.concatenate([segment.slots for segment in segments])
        self._written = torch.from_numpy(slots.astype(np.int64)).to(pool.keys[0].device)
        self._longest = max(int(segment.positions.max()) + 1 for segment in segments)
        self._layouts: dict[tuple[int | None, int], _Layout] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(0, self._written, key[0].transpose(0, 1))
        values.index_copy_(0, self._written, value[0].transpose(0, 1))
        index, spans = self._layout(scoring.window, query.shape[1] // key.shape[1])
        # [keys, Hkv, D] -> [1, Hkv, keys, D], a view
        all_keys = self._backend.gathered("key", keys, index).transpose(0, 1)[None]
        all_values = self._backend.gathered("value", values, index).transpose(0, 1)[None]
        parts = []
        for span in spans:
            rows = query[:, :, span.row : span.row + span.rows]
            k = all_keys[:, :, span.key : span.key + span.keys]
            v = all_values[:, :, span.key : span.key + span.keys]
            parts.append(_attend_span(rows, k, v, span, scoring).transpose(1, 2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _layout(self, window: int | None, groups: int) -> _Layout:
        if window is not None and window >= self._longest:
            window = None
        if (known := self._layouts.get((window, groups))) is not None:
            return known
        index, spans = [], []
        row = key = 0
        like = self.pool.keys[0]
        for segment in self._segments:
            # The first row of a segment sees the keys that lie furthest back.
            first = 0 if window is None else max(0, segment.start - window + 1)
            index += [segment.prefix[first:], segment.slots]
            keys = segment.start - first + segment.rows
            mask = _mask(segment, first, window, like)
            folds = mask is not None and groups > 1 and segment.rows <= FOLD_ROWS
            folded = mask.repeat(groups, 1) if mask is not None and folds else mask
            spans.append(_Span(row, segment.rows, key, keys, mask, folded))
            row += segment.rows
            key += keys
        layout = self._layouts[window, groups] = torch.from_numpy(np.concatenate(index)).to(like.device), tuple(spans)
        return layout


def _mask(segment: Segment, first: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return what is added to the scores of a segment's rows on the keys from position `first` on; None if all is 0."""
    if segment.rows == 1:
        return None
    before = segment.start - first
    mask = torch.zeros((segment.rows, before + segment.rows), dtype=like.dtype)
    mask[:, before:].masked_fill_(torch.from_numpy(~segment.visible()), float("-inf"))
    if window is not None:
        positions = np.concatenate([np.arange(first, segment.start), segment.positions])
        beyond = positions[None, :] <= segment.positions[:, None] - window
        mask.masked_fill_(torch.from_numpy(beyond), float("-inf"))
    return mask.to(like.device)


def _attend_span(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: _Span, scoring: Scoring) -> torch.Tensor:
    """Return the attention of a span's rows: q `[1, Hq, n, Dk]`, k `[1, Hkv, S, Dk]`, v `[1, Hkv, S, Dv]` ->
    `[1, Hq, n, Dv]`."""
    heads, rows = q.shape[1], q.shape[2]
    kv_heads = k.shape[1]
    if scoring.softcap is not None or scoring.sinks is not None:
        return _attend_plainly(q, k, v, span.mask, scoring)
    if heads == kv_heads:
        return scaled_dot_product_attention(q, k, v, attn_mask=span.mask, scale=scoring.scale)
    if rows > FOLD_ROWS:
        return scaled_dot_product_attention(q, k, v, attn_mask=span.mask, scale=scoring.scale, enable_gqa=True)
    folded = q.reshape(1, kv_heads, -1, q.shape[3])
    out = scaled_dot_product_attention(folded, k, v, attn_mask=span.folded, scale=scoring.scale)
    return out.reshape(1, heads, rows, -1)


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Compute what scaled_dot_product_attention does not offer: softcap and sinks. Shapes as in `_attend_span`."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)
