"""Test many sequences in one decode: every row of logits is that of a sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from small_pair import DRAFT

from outrider.core.errors import BadRequest
from outrider.llama import ChainContext, LlamaModel, TreeContext

TOLERANCE = 0.02
"""Tolerance for the f16 cache of ChainContext; different tokens differ by far more."""


@pytest.fixture
def chains(model: LlamaModel) -> Iterator[ChainContext]:
    with ChainContext(model, length=100, count=6, batch=32) as chains:
        yield chains


def assert_linear(linear: TreeContext, tokens: Sequence[int], row: np.ndarray) -> None:
    linear.clear()
    np.testing.assert_allclose(row, linear.reset(list(tokens)), rtol=0, atol=TOLERANCE)


def test_sequences_of_different_lengths_grow_side_by_side(chains: ChainContext, linear: TreeContext) -> None:
    texts: dict[int, list[int]] = {4: [], 0: [], 2: []}
    for turn, lengths in enumerate(((3, 40, 1), (1, 1, 1), (20, 1, 30))):
        feeds = [(s, [(7 * s + 13 * turn + i) % 250 for i in range(n)]) for s, n in zip(texts, lengths, strict=True)]
        rows = chains.feed(feeds)
        for (sequence, tokens), row in zip(feeds, rows, strict=True):
            texts[sequence] += tokens
            assert_linear(linear, texts[sequence], row)
            assert chains.held(sequence) == len(texts[sequence])


def test_what_is_taken_back_leaves_no_trace(chains: ChainContext, linear: TreeContext) -> None:
    chains.feed([(1, [5, 6, 7, 8, 9]), (3, [1, 2])])
    chains.truncate(1, 2)
    rows = chains.feed([(3, [4]), (1, [40, 41])])
    assert_linear(linear, [1, 2, 4], rows[0])
    assert_linear(linear, [5, 6, 40, 41], rows[1])
    chains.truncate(1, 0)
    assert_linear(linear, [99], chains.feed([(1, [99])])[0])


@pytest.mark.parametrize(
    ("feeds", "wrong"),
    [
        ([(6, [1])], "sequence is 6"),
        ([(-1, [1])], "sequence is -1"),
        ([(0, [1]), (0, [2])], "there once"),
        ([(0, [])], "0 long"),
        ([(0, [1] * 101)], "101 long"),
        ([(0, [1, 100_000])], "is 100000"),
        ([(0, [-1])], "is -1"),
    ],
)
def test_what_would_abort_the_process_is_refused_before_anything_changes(
    chains: ChainContext, feeds: list[tuple[int, list[int]]], wrong: str
) -> None:
    with pytest.raises(BadRequest, match=wrong):
        chains.feed(feeds)
    assert [chains.held(s) for s in range(6)] == [0] * 6


def test_quantised_weights_decode_many_tokens_at_once() -> None:
    """On a CPU with AMX this ends the process, unless llama.cpp's tile kernels are left alone."""
    with LlamaModel.load(DRAFT) as model, ChainContext(model, length=64, count=4) as chains:
        wide = chains.feed([(0, [1, 2, 3, 4, 5]), (1, [1, 2, 3])])
        one_by_one = [chains.feed([(2, [token])]) for token in (1, 2, 3)]
    np.testing.assert_allclose(wide[1], one_by_one[-1][0], atol=0.05)
