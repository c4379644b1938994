"""Test that sessions attended in one call get what each of them gets alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kernels import attention
from cloud_verifier.engine.torch_backend.kernels.attention import Scoring, SdpaBackend
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SINKS = torch.tensor([0.3, -0.2, 0.1, 0.0])
SCORINGS = [Scoring(0.35), Scoring(0.35, window=5), Scoring(0.35, softcap=2.0), Scoring(0.35, sinks=SINKS)]


def segments(pool: KVPool, shapes: tuple[tuple[int, int, tuple[int, ...]], ...]) -> list[Segment]:
    """Return sessions of these shapes, with slots that are not adjacent."""
    found = []
    for start, chain, parents in shapes:
        positions = list(range(start, start + chain))
        for parent in parents:
            positions.append(positions[parent] + 1)
        slots = np.random.default_rng(start).permutation(pool.allocate(start + len(positions)))
        tokens = np.zeros(len(positions), dtype=np.int64)
        rows = np.array(parents, dtype=np.int64)
        found.append(Segment(tokens, chain, rows, np.array(positions), slots[:start], slots[start:], True))
    return found


def filled_pool() -> KVPool:
    pool = KVPool((LayerShape(KV_HEADS, WIDTH, WIDTH),), 300, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=generator)
    return pool


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("start", [0, 30])
def test_a_prompt_in_blocks_gets_what_it_gets_as_a_whole(
    scoring: Scoring, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = filled_pool()
    shapes = ((start, 60, (59, 60, 59)), (9, 1, (0,)), (start, 41, ()))
    sessions = segments(pool, shapes)
    rows = sum(segment.rows for segment in sessions)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, rows, WIDTH, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, rows, WIDTH, generator=generator) for _ in range(2))
    found = []
    for block in (100, 16):
        monkeypatch.setattr(attention, "_BLOCK_ROWS", block)
        found.append(SdpaBackend().plan(sessions, pool).attend(0, query, key, value, scoring).clone())
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
