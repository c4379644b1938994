"""Test that passages of the log become spans without a gap, and pieces of a window."""

from __future__ import annotations

import numpy as np
from tiny_drafts import passage

from cloud_verifier.distill.data.spans import cut, join_passages
from cloud_verifier.traffic.passage import Passage


def joined(*passages: Passage) -> list[Passage]:
    return join_passages(passages)


def shown(found: list[Passage]) -> list[tuple[str, int, list[int]]]:
    return [(one.session_id, one.start, one.tokens.tolist()) for one in found]


def test_a_gap_cuts_the_text() -> None:
    found = joined(passage("a", 0, [1, 2]), passage("a", 3, [4, 5]), passage("a", 5, [6]))
    assert shown(found) == [("a", 0, [1, 2]), ("a", 3, [4, 5, 6])]


def test_where_two_records_disagree_the_text_is_cut_and_not_mended() -> None:
    found = joined(passage("a", 0, [1, 2, 3]), passage("a", 2, [8, 4]))
    assert shown(found) == [("a", 0, [1, 2, 3]), ("a", 2, [8, 4])]


def test_another_tenant_or_class_of_the_same_session_is_another_text() -> None:
    found = joined(
        passage("a", 0, [1]), passage("a", 1, [2], traffic_class="prose"), passage("a", 2, [3], tenant="other")
    )
    assert sorted(one.tokens.tolist() for one in found) == [[1], [2], [3]]


def test_a_span_is_as_new_as_its_newest_passage_and_expires_with_the_first() -> None:
    (found,) = joined(
        passage("a", 0, [1], time_unix=5.0, expires_unix=50.0), passage("a", 1, [2], time_unix=9.0, expires_unix=40.0)
    )
    assert (found.time_unix, found.expires_unix) == (9.0, 40.0)


def test_pieces_cover_every_position_but_the_first_exactly_once() -> None:
    (found,) = joined(passage("a", 10, list(range(100))))
    pieces = list(cut(found, window=16, overlap=4))
    assert [token for one in pieces for token in range(one.start, one.end)] == list(range(11, 110))
    assert all(len(one.prompt) + len(one) <= 16 for one in pieces)
    assert [len(one.prompt) for one in pieces] == [1] + [4] * (len(pieces) - 1)
    for one in pieces:
        context = len(one.prompt)
        assert [*one.prompt, *one.tokens] == list(range(one.start - 10 - context, one.end - 10))


def asked(count: int) -> np.ndarray:
    return np.arange(1000, 1000 + count, dtype=np.int32)


def test_a_prompt_stands_before_the_first_piece_and_its_first_token_is_learnt_from() -> None:
    (found,) = joined(passage("a", 0, list(range(60)), prompt=asked(3)), passage("a", 60, list(range(60, 100))))
    first, *others = cut(found, window=16, overlap=4, prompt=5)
    assert first.prompt.tolist() == [1000, 1001, 1002] and (first.start, len(first)) == (0, 13)
    assert [token for one in (first, *others) for token in range(one.start, one.end)] == list(range(100))
    assert all(one.prompt.tolist() == list(range(one.start - 4, one.start)) for one in others)
