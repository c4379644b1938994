"""Test that a passage is cut, joined and redacted without moving a position."""

from __future__ import annotations

import numpy as np
from passages import NOW, passage

from cloud_verifier.traffic.passage import join


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
