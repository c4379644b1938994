"""Define the Protocol of attention backends over KV slots, and implement the portable one, `sdpa`.

A backend plans a step once; the plan then serves every layer. The `sdpa` plan writes the rows' keys and values to their
slots, gathers each segment's prefix and rows in one index_select (none is needed where the slots are adjacent), and
attends to segments of about the same size in one call, padded to the largest of them. A prompt is split into blocks of
rows, none of which is multiplied by the keys behind it. Query heads that share a key head are folded into query rows
where rows are few: one row of a model with eight query heads and two key heads becomes two batches of four rows, and
the keys are not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from cloud_verifier.engine.torch_backend.batch import Ints, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, Slots

_CALL = 400_000
"""Products of a query's and a key's elements that take as long as an attention call does by itself: padding of as much
is worth saving a call. Zen 4, eight heads of 64, prefixes of 256, one row of each of 16 sessions: 0.71 ms in 16 calls,
0.30 ms in one."""
_BLOCK_ROWS = 128
"""Rows of a block of a prompt; Zen 4, a prompt of 1,024 tokens: attention 500 ms whole, 289 ms in blocks of 128, 336 in
blocks of 256."""
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


running: ContextVar[AttentionPlan] = ContextVar("running")
"""The plan of the forward pass that runs in this thread."""


class AttentionBackend(Protocol):
    """Computes attention over the pool."""

    name: str

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        """Build the index tensors and masks of one step."""


class SdpaBackend:
    """Computes attention, as the reference, with torch's scaled_dot_product_attention, on any device."""

    name = "sdpa"

    def __init__(self) -> None:
        self._scratch: dict[tuple[object, ...], torch.Tensor] = {}

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        return _SdpaPlan(segments, pool, self)

    def gathered(self, kind: str, source: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
        """Return `source[index]`, a view or in a buffer that grows and the next layer of the same shape overwrites."""
        if isinstance(index, slice):
            return source[index]
        rows = index.shape[0]
        like = (kind, source.shape[1], source.shape[2], source.dtype, source.device)
        buffer = self._scratch.get(like)
        if buffer is None or buffer.shape[0] < rows:
            buffer = source.new_empty((max(1024, 2 * rows), *source.shape[1:]))
            self._scratch[like] = buffer
        return torch.index_select(source, 0, index, out=buffer[:rows])


@dataclass(frozen=True)
class _Piece:
    """Adjacent rows of a segment, with the keys that any of them may see."""

    segment: Segment
    row: int
    """Its first row in the step."""
    begin: int
    end: int
    """Its rows of the segment: those from `begin` on, before `end`."""
    first: int
    """Position of its first key; the keys end with that of its last row."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (rows, keys)."""
        return self.end - self.begin, len(self.segment.prefix) - self.first + self.end

    def rows(self, count: int) -> Ints:
        """Return its rows of the step, `[count]`: the last one is repeated."""
        return self.row + np.minimum(np.arange(count), self.end - self.begin - 1)

    def slots(self, count: int) -> Slots:
        """Return the slots of its keys, `[count]`: the last one is repeated, since another's may hold no number."""
        slots = np.concatenate([self.segment.prefix[self.first :], self.segment.slots[self._skipped : self.end]])
        return slots if len(slots) == count else np.concatenate([slots, np.repeat(slots[-1:], count - len(slots))])

    def mask(self, mask: NDArray[np.float32], window: int | None) -> None:
        """Write 0 to `mask` `[n, K]` where a row sees a key; repeated rows see what the last one does."""
        segment, (rows, keys), skipped = self.segment, self.shape, self._skipped
        before = keys - (self.end - skipped)
        mask[:rows, :before] = 0.0
        mask[:rows, before:keys][segment.visible(self.begin, self.end)[:, skipped:]] = 0.0
        if window is not None:
            positions = np.concatenate([np.arange(self.first, segment.start), segment.positions[skipped : self.end]])
            hidden = positions[None, :] <= segment.positions[self.begin : self.end, None] - window
            mask[:rows, : len(positions)][hidden] = -np.inf
        mask[rows:] = mask[rows - 1]

    @property
    def _skipped(self) -> int:
        """Return the number of the segment's rows that are before the first key."""
        return max(0, self.first - len(self.segment.prefix))


@dataclass(frozen=True)
class _Group:
    """S pieces that one call attends to, padded to n rows and K keys each."""

    shape: tuple[int, int, int]
    """(S, n, K)"""
    rows: torch.Tensor | None
    """int64 `[S * n]`: rows of the step; None if they are all of them, in order."""
    keys: slice
    """Its S * K keys among those gathered; blocks of one prompt share some."""
    mask: torch.Tensor | None
    """`[S, 1, n, K]` to add to the scores; None if every row sees every key."""
    folded: torch.Tensor | None
    """The mask once per query head of those that share a key head, `[S, 1, heads * n, K]`."""


@dataclass(frozen=True)
class _Layout:
    """Tables that layers with the same window and heads share."""

    slots: torch.Tensor | slice
    """Slots of all groups' keys, int32 `[sum of S * K]`; a slice if they are adjacent."""
    groups: tuple[_Group, ...]
    places: torch.Tensor | None
    """int64 `[T]`: each row's place in the results of the groups; None if they are in order."""


class _SdpaPlan:
    def __init__(self, segments: Sequence[Segment], pool: KVPool, backend: SdpaBackend) -> None:
        self.pool = pool
        self._segments = segments
        self._backend = backend
        self._device = pool.keys[0].device
        self._written = _tensor(np.concatenate([segment.slots for segment in segments]), self._device)
        self._longest = max(int(segment.positions.max()) + 1 for segment in segments)
        self._layouts: dict[tuple[int | None, torch.Size, int], _Layout] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        count = len(self._written)  # rows beyond it are padding
        keys.index_copy_(0, self._written, key[0].transpose(0, 1)[:count])
        values.index_copy_(0, self._written, value[0].transpose(0, 1)[:count])
        layout = self._layout(scoring.window, query.shape, key.shape[1])
        all_keys = self._backend.gathered("key", keys, layout.slots)
        all_values = self._backend.gathered("value", values, layout.slots)
        parts = [_attend_group(query[0], all_keys, all_values, group, scoring) for group in layout.groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if layout.places is None else out.index_select(0, layout.places))[None]

    def _layout(self, window: int | None, query: torch.Size, kv_heads: int) -> _Layout:
        if window is not None and window >= self._longest:
            window = None
        if (known := self._layouts.get((window, query, kv_heads))) is not None:
            return known
        _, heads, tokens, width = query
        groups: list[_Group] = []
        rows: list[Ints] = []
        slots: list[Slots] = []
        gathered = 0

        def add(pieces: Sequence[_Piece], keys: slice, length: int) -> None:
            n = max(piece.shape[0] for piece in pieces)
            here = np.array([p.row for p in pieces]) if n == 1 else np.concatenate([piece.rows(n) for piece in pieces])
            some = None if np.array_equal(here, np.arange(tokens)) else _tensor(here, self._device)
            mask, folded = self._masks(pieces, n, length, window, heads // kv_heads)
            groups.append(_Group((len(pieces), n, length), some, keys, mask, folded))
            rows.append(here)

        whole, split = _pieces(self._segments, window)
        for pieces in _grouped(whole, _CALL // (heads * width)):
            length = max(piece.shape[1] for piece in pieces)
            add(pieces, slice(gathered, gathered + len(pieces) * length), length)
            slots += [piece.slots(length) for piece in pieces]
            gathered += len(pieces) * length
        for blocks in split:
            first, last = blocks[0].first, blocks[-1]
            for block in blocks:
                begin = gathered + block.first - first
                add([block], slice(begin, begin + block.shape[1]), block.shape[1])
            all_keys = replace(last, first=first)
            slots.append(all_keys.slots(all_keys.shape[1]))
            gathered += all_keys.shape[1]
        layout = _Layout(self._slots(np.concatenate(slots)), tuple(groups), self._places(np.concatenate(rows), tokens))
        self._layouts[window, query, kv_heads] = layout
        return layout

    def _masks(
        self, pieces: Sequence[_Piece], rows: int, keys: int, window: int | None, share: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a group's mask, and for `share` query heads that share a key head; None if every key is seen."""
        additive = np.full((len(pieces), 1, rows, keys), -np.inf, dtype=np.float32)
        for piece, mask in zip(pieces, additive[:, 0], strict=True):
            if rows == 1:
                mask[:, : piece.shape[1]] = 0.0
            else:
                piece.mask(mask, window)
        if not additive.any():
            return None, None
        whole = torch.from_numpy(additive).to(self._device, self.pool.keys[0].dtype)
        return whole, whole.repeat(1, 1, share, 1) if rows <= FOLD_ROWS else whole

    def _slots(self, slots: Slots) -> torch.Tensor | slice:
        first, count = int(slots[0]), len(slots)
        if np.array_equal(slots, np.arange(first, first + count)):
            return slice(first, first + count)
        return torch.from_numpy(slots).to(self._device)

    def _places(self, rows: Ints, tokens: int) -> torch.Tensor | None:
        """Return where each of the step's `tokens` rows is in `rows`; one that is padding takes the first's place."""
        places = np.zeros(tokens, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        in_order = len(rows) == tokens and np.array_equal(places, np.arange(tokens))
        return None if in_order else _tensor(places, self._device)


def _tensor(index: Ints | Slots, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(index.astype(np.int64)).to(device)


def _pieces(segments: Sequence[Segment], window: int | None) -> tuple[list[_Piece], list[list[_Piece]]]:
    """Return the segments that are one piece each, and the blocks of the others, which read a long part of a prompt."""
    whole: list[_Piece] = []
    split: list[list[_Piece]] = []
    row = 0
    for segment in segments:
        # All rows of a tree stay together; the first row of a piece sees the keys that lie furthest back.
        ends = [*range(_BLOCK_ROWS, segment.chain - _BLOCK_ROWS // 2, _BLOCK_ROWS), segment.rows]
        begins = [0, *ends[:-1]]
        blocks = [
            _Piece(
                segment, row + begin, begin, end, 0 if window is None else max(0, segment.start + begin - window + 1)
            )
            for begin, end in zip(begins, ends, strict=True)
        ]
        if len(blocks) > 1:
            split.append(blocks)
        else:
            whole += blocks
        row += segment.rows
    return whole, split


def _grouped(pieces: Sequence[_Piece], allowed: int) -> list[list[_Piece]]:
    """Group pieces of about the same size: one that joins adds at most `allowed` padded pairs of a row and a key."""
    groups: list[list[_Piece]] = []
    most = (0, 0)
    for piece in sorted(pieces, key=lambda piece: piece.shape, reverse=True):
        rows, keys = piece.shape
        joined = (max(most[0], rows), max(most[1], keys))
        members = len(groups[-1]) if groups else 0
        added = (members + 1) * joined[0] * joined[1] - members * most[0] * most[1] - rows * keys
        if members and added <= allowed:
            groups[-1].append(piece)
            most = joined
        else:
            groups.append([piece])
            most = piece.shape
    # In order of their rows, so that a group of all segments needs no index.
    return [sorted(group, key=lambda piece: piece.row) for group in groups]


def _attend_group(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, scoring: Scoring
) -> torch.Tensor:
    """Return the attention of a group's rows: query `[Hq, T, Dk]`, keys `[N, Hkv, Dk]`, values `[N, Hkv, Dv]` ->
    `[S * n, Hq, Dv]`."""
    count, rows, length = group.shape
    heads, kv_heads = query.shape[0], keys.shape[1]
    chosen = query if group.rows is None else query.index_select(1, group.rows)
    q = chosen.reshape(heads, count, rows, -1).transpose(0, 1)
    k = keys[group.keys].view(count, length, kv_heads, -1).transpose(1, 2)
    v = values[group.keys].view(count, length, kv_heads, -1).transpose(1, 2)
    if scoring.softcap is not None or scoring.sinks is not None:
        out = _attend_plainly(q, k, v, group.mask, scoring)
    elif rows > FOLD_ROWS:
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scoring.scale, enable_gqa=True)
    else:
        folded = q.reshape(count, kv_heads, -1, q.shape[3])
        out = scaled_dot_product_attention(folded, k, v, attn_mask=group.folded, scale=scoring.scale)
        out = out.reshape(count, heads, rows, -1)
    return out.transpose(1, 2).flatten(0, 1)


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Compute what scaled_dot_product_attention does not offer: softcap and sinks.

    q `[S, Hq, n, Dk]`, k `[S, Hkv, K, Dk]`, v `[S, Hkv, K, Dv]` -> `[S, Hq, n, Dv]`.
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)
