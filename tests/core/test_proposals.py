"""Test that the draft proposes the tokens that the target's filters would leave."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.processors import TokenCounts
from outrider.core.proposals import propose
from outrider.core.sampling import SamplingParams

LOGITS = np.log(np.array([0.5, 0.25, 0.25], dtype=np.float64))


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {0}), (0.75, {0, 1}), (0.7500001, {0, 1, 2})])
def test_top_p_proposes_nothing_beyond_what_reaches_it_exactly(top_p: float, kept: set[int]) -> None:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    assert {p.token for p in propose(LOGITS, params, 5, 0, TokenCounts(), (), 4)} == kept


def test_a_token_that_occurred_is_proposed_after_one_that_did_not() -> None:
    params = SamplingParams(presence_penalty=1.0)
    assert [p.token for p in propose(LOGITS, params, 0, 0, TokenCounts([0]), [1], 4)] == [2, 0, 1]
