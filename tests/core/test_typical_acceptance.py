"""Test which child typical acceptance takes, and the bounds of its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.errors import BadRequest
from outrider.core.sampling import TypicalAcceptance
from outrider.core.verification import typical_child

IDS = np.arange(4, dtype=np.int64)
P = np.array([0.4, 0.3, 0.2, 0.1])
H = -float((P * np.log(P)).sum())


def child(children: Sequence[int], epsilon: float, delta: float, p: np.ndarray = P) -> int | None:
    return typical_child(IDS[: len(p)], np.log(p), children, TypicalAcceptance(epsilon, delta))


def test_the_likeliest_child_is_taken_in_whatever_order_they_come() -> None:
    assert child([3, 1, 2], 0.15, 1e9) == child([2, 1, 3], 0.15, 1e9) == 1


@pytest.mark.parametrize(("epsilon", "taken"), [(0.29, 1), (0.31, None)])
def test_with_a_great_delta_the_threshold_is_epsilon(epsilon: float, taken: int | None) -> None:
    assert child([1, 3], epsilon, 1e9) == taken


@pytest.mark.parametrize(("factor", "taken"), [(0.99, 2), (1.01, None)])
def test_with_a_great_epsilon_the_threshold_is_a_share_of_the_exponential_of_the_entropy(
    factor: float, taken: int | None
) -> None:
    assert child([2, 3], 1.0, factor * 0.2 / math.exp(-H)) == taken


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, True, "much"])
@pytest.mark.parametrize("name", ["epsilon", "delta"])
def test_parameters_out_of_bounds_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"typical_{name}") as caught:
        TypicalAcceptance(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"typical_{name}"
