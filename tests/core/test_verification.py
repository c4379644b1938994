"""Test verification against its definition: follow the target's own tokens for as long as the batch holds them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from single_walk import verify

from outrider.core.verification import TreeBatch

# Batch: row 0, its children 5 (row 1) and 6 (row 2), and 7 (row 3) below 5.
BATCH = TreeBatch(ids=(11, 12, 13), parents=(0, 0, 1), tokens=(5, 6, 7), depths=(1, 1, 2), position=4)


def never(token: int, position: int) -> bool:
    return False


def test_verification_asks_for_the_row_it_stands_on_and_the_path_so_far() -> None:
    asked = []
    verify(
        BATCH, lambda row, path: asked.append((row, tuple(path))) or [5, 7, 9][row if row == 0 else len(path)], never
    )
    assert asked == [(0, ()), (1, (5,)), (3, (5, 7))]


NODES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=15)


@settings(max_examples=300)
@given(NODES, st.lists(st.integers(0, 2), min_size=20, max_size=20), st.integers(1, 20))
def test_no_batch_changes_the_tokens(nodes: list[tuple[int, int]], sequence: list[int], length: int) -> None:
    """With any tree, the committed tokens are a prefix of the target's own sequence."""
    parents, tokens, depths, taken = [], [], [0], set()
    for choice, token in nodes:
        parent = choice % len(depths)
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            depths.append(depths[parent] + 1)
    batch = TreeBatch(tuple(range(1, len(tokens) + 1)), tuple(parents), tuple(tokens), tuple(depths[1:]), 0)
    verified = verify(batch, lambda row, path: sequence[len(path)], lambda token, position: position + 1 >= length)
    assert list(verified.tokens) == sequence[: len(verified.tokens)]
    assert 1 <= len(verified.tokens) <= length
    assert len(verified.tokens) - len(verified.rows) in (0, 1)
    assert [tokens[row - 1] for row in verified.rows] == sequence[: len(verified.rows)]
    if len(verified.tokens) < length:  # it stopped because no node carries the last token
        last = verified.rows[-1] if verified.rows else 0
        assert (last, verified.tokens[-1]) not in taken
