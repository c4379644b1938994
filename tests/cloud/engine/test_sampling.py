"""Test that the target's token for one row follows the sampling parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cloud_verifier.engine.sampling import Sampler
from outrider.core.errors import InternalError
from outrider.core.sampling import SamplingParams


def test_penalties_count_the_path_of_the_row_too() -> None:
    params = SamplingParams(presence_penalty=1.0)
    sampler = Sampler(params, [])
    row = torch.tensor([0.0, 2.0, 1.5])
    assert sampler.choose(row, 0, []) == 1
    assert sampler.choose(row, 0, [1]) == 2
    assert Sampler(params, [1]).choose(row, 0, []) == 1
    assert Sampler(params, [], [1]).choose(row, 0, []) == 2
    sampler.commit([1])
    assert sampler.choose(row, 0, []) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.1, presence_penalty=1.0),
    ],
)
def test_logits_that_are_no_numbers_are_an_error(bad: float, params: SamplingParams) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(InternalError, match="not finite"):
        Sampler(params, [0]).choose(torch.tensor([0.0, bad, 1.0]), 0, [])
