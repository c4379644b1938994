"""Build a step's index tables for the triton kernels: one int32 array that is copied to the device at once.

Its layout, with `width` places per row section (rows beyond the step's are padding):

    header    items, words of a row's bits
    slots     [width] the slot of each row's key and value; -1 for padding, which is written nowhere
    first     [width] row r's partial results are at first[r], first[r] + TILE, first[r] + 2 * TILE, ...
    parts     [width] number of a row's partial results; 0 for padding
    positions [width]
    items     [items, FIELDS] one for each program: a tile of rows by a span of keys, which stores TILE partial results
    bits      [nodes, words] which nodes of its segment each node sees: its ancestors and itself
    keys      per segment the slots of its prefix and of its rows

Key number j of a segment has position j in its prefix and chain, and spans of keys end at fixed numbers. So how a
row's sum over prefix and chain is cut depends on nothing else in the batch, nor on how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.torch_backend.batch import Segment

Table = NDArray[np.int32]

HEADER = 4
FIELDS = 9
"""Number of fields of an item: first row, rows, first row within the segment, prefix length, chain length, where the
segment's keys begin in the table, first and last + 1 key, where the bits of the segment's nodes begin in the table."""
TILE = 16
"""Number of rows in one item; fixed, so that a row is computed by the same instructions in every batch."""
WIDTHS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows for which there are CUDA graphs; a step is padded to the next one. An H100 takes 9, 11, 12 and
17 ms for 16, 128, 256 and 512 rows of a Qwen3 of 8B."""
SPANS = ((4_096, 512), (65_536, 1_024), (4_194_304, 4_096))
"""(position, number of keys in a span below it): few enough that one session fills a GPU, enough that the partial
results of long prompts stay small. On an H100, spans of 1,024 keys read 1.1 times as many bytes a second as spans of
512, but take a single session behind 2,048 keys 1.3 times as long."""

_bounds = [
    np.arange(begin, end, step) for begin, (end, step) in zip([0, *(end for end, _ in SPANS[:-1])], SPANS, strict=True)
]
BOUNDS: NDArray[np.int64] = np.concatenate([*_bounds, [SPANS[-1][0], np.iinfo(np.int32).max]])
"""Positions at which spans begin; all positions beyond the last one of SPANS are one span."""


def width_of(rows: int) -> int:
    """Return the width that so many rows are padded to; the number of rows itself if it is above all widths."""
    return next((width for width in WIDTHS if rows <= width), rows)


def build(segments: Sequence[Segment], width: int, take: Callable[[int], Table]) -> tuple[Table, int]:
    """Return the table, in an array that `take` returns for its length, and the number of items."""
    rows = np.array([len(segment.tokens) for segment in segments])
    chain = np.array([segment.chain for segment in segments])
    start = np.array([len(segment.prefix) for segment in segments])
    row = _offsets(rows)
    total = int(rows.sum())

    tiles = -(-rows // TILE)
    tile_at = _offsets(tiles)
    of_tile = np.repeat(np.arange(len(rows)), tiles)
    local = (np.arange(len(of_tile)) - tile_at[of_tile]) * TILE
    held = np.minimum(TILE, rows[of_tile] - local)
    end = start[of_tile] + local + held  # a row sees no row of its segment after itself
    spans = np.searchsorted(BOUNDS, end)
    item_at = _offsets(spans)
    of_item = np.repeat(np.arange(len(spans)), spans)
    span = np.arange(len(of_item)) - item_at[of_item]

    bits = _bits(segments, rows - chain)
    bits_at = HEADER + 4 * width + FIELDS * len(of_item)
    keys_at = bits_at + bits.size
    table = take(keys_at + int(start.sum()) + total)
    table[0], table[1] = len(of_item), bits.shape[1]
    sections = table[HEADER : HEADER + 4 * width].reshape(4, width)
    sections[0, total:] = -1
    sections[1:, total:] = 0
    sections[0, :total] = np.concatenate([segment.slots for segment in segments])
    place = np.arange(total) - np.repeat(row, rows)
    of_row = np.repeat(tile_at, rows) + place // TILE
    sections[1, :total] = item_at[of_row] * TILE + place % TILE
    sections[2, :total] = spans[of_row]
    sections[3, :total] = np.concatenate([segment.positions for segment in segments])

    items = table[HEADER + 4 * width : bits_at].reshape(-1, FIELDS)
    segment_of = of_tile[of_item]
    first_row, item_rows, local_row, prefix, chain_rows, first_key, low, high, first_bits = items.T
    first_row[:] = row[segment_of] + local[of_item]
    item_rows[:] = held[of_item]
    local_row[:] = local[of_item]
    prefix[:] = start[segment_of]
    chain_rows[:] = chain[segment_of]
    first_key[:] = keys_at + (row + _offsets(start))[segment_of]
    low[:] = BOUNDS[span]
    high[:] = np.minimum(BOUNDS[span + 1], end[of_item])
    first_bits[:] = bits_at + bits.shape[1] * _offsets(rows - chain)[segment_of]

    table[bits_at:keys_at] = bits.reshape(-1).view(np.int32)
    np.concatenate([part for segment in segments for part in (segment.prefix, segment.slots)], out=table[keys_at:])
    return table, len(of_item)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each part begins if parts of these lengths follow one another."""
    return np.cumsum(counts) - counts


def _bits(segments: Sequence[Segment], nodes: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return `[nodes of all segments, words]`: bit i of a node's words is set if it sees node i of its segment.

    Computed by pointer doubling: after k rounds a node's bits hold its nearest 2**k ancestors, itself included, and
    `ancestor` is the next one.
    """
    count = int(nodes.sum())
    words = (int(nodes.max()) + 31) // 32
    seen = np.zeros((count + 1, words), dtype=np.uint32)  # the last row is the root of all nodes, no node itself
    if count == 0:
        return seen[:0]
    chains = np.repeat([segment.chain for segment in segments], nodes)
    begin = np.repeat(_offsets(nodes), nodes)
    own = np.arange(count) - begin
    ancestor = np.concatenate([segment.parents for segment in segments]) - chains
    ancestor = np.append(np.where(ancestor >= 0, ancestor + begin, count), count)
    seen[np.arange(count), own // 32] = np.left_shift(np.uint32(1), (own % 32).astype(np.uint32))
    while (ancestor != count).any():
        seen |= seen[ancestor]
        ancestor = ancestor[ancestor]
    return seen[:count]
