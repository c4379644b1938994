"""Test that a passage is cut, joined and redacted without moving a position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from passages import NOW, passage, passages, same

from cloud_verifier.traffic.passage import Passage, join


@given(passages(), st.data())
def test_what_was_cut_and_joined_is_as_it_was(whole: Passage, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole)))
    first, second = whole.cut(0, at), whole.cut(at, len(whole))
    assert first.continues_in(second)
    assert same(join([first, second]), whole)


@given(passages(), st.data())
def test_what_is_hidden_is_left_out_and_all_else_keeps_its_position(whole: Passage, data: st.DataObject) -> None:
    hidden = np.array(data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole))), dtype=bool)
    left = list(whole.without(hidden))
    seen = {part.start + i: int(token) for part in left for i, token in enumerate(part.tokens)}
    kept = {whole.start + i: int(token) for i, token in enumerate(whole.tokens) if not hidden[i]}
    assert seen == kept
    assert all(len(part) for part in left)
    assert all(one.end < other.start for one, other in pairwise(left))


def test_a_prompt_stays_with_the_texts_very_beginning() -> None:
    whole = passage(6, prompt=np.array([7, 8], dtype=np.int32))
    assert [whole.cut(0, 2).prompt.tolist(), whole.cut(1, 6).prompt.tolist()] == [[7, 8], []]
    hidden = np.array([True, False, False, True, False, False])
    assert [len(part.prompt) for part in whole.without(hidden)] == [0, 0]
    assert [len(part.prompt) for part in whole.without(hidden[::-1])] == [2, 0]


def test_a_joined_passage_was_produced_with_the_last_and_expires_with_the_first() -> None:
    parts = [passage(1, start=i, time_unix=NOW + i, expires_unix=NOW + 100 + i) for i in range(3)]
    joined = join(parts)
    assert (joined.time_unix, joined.expires_unix) == (NOW + 2, NOW + 100)
