"""Test that the draft proposes the tokens that the target's filters would leave."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.coupling import position_key
from outrider.core.processors import TokenCounts
from outrider.core.proposals import propose
from outrider.core.sampling import SamplingParams
from outrider.core.target_token import reference_token

LOGITS = np.log(np.array([0.5, 0.25, 0.25], dtype=np.float64))


def test_a_token_that_occurred_is_proposed_after_one_that_did_not() -> None:
    params = SamplingParams(presence_penalty=1.0)
    assert [p.token for p in propose(LOGITS, params, 0, 0, TokenCounts((), [0]), [1], 4)] == [2, 0, 1]


@pytest.mark.parametrize("deviation", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_p": 0.3}, {"min_p": 0.02}, {"top_k": 40}])
def test_a_draft_that_equals_the_target_proposes_its_token_however_flat_the_logits_are(
    deviation: float, params: dict[str, float]
) -> None:
    sampling = SamplingParams(temperature=0.8, **params)  # type: ignore[arg-type]
    rng, right = np.random.default_rng(2), 0
    for position in range(25):
        row = (deviation * rng.standard_normal(30_000)).astype(np.float32)
        token = reference_token(row, sampling, position_key(9, position))
        right += propose(row, sampling, 9, position, TokenCounts(), (), 1)[0].token == token
    assert right >= 21  # how probable the less likely tokens are is estimated
