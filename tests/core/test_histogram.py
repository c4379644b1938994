"""Test that a histogram has a count for each range of values."""

from __future__ import annotations

import pytest

from outrider.core.histogram import Histogram


def test_a_value_counts_in_the_first_bucket_that_is_not_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 0]


def test_what_exceeds_all_bounds_has_a_bucket_of_its_own():
    histogram = Histogram((1.0,))
    histogram.add(7.0, times=3)
    assert histogram.counts == [0, 3]
    assert histogram.sum == pytest.approx(21.0)
    assert histogram.total == 3


def test_a_copy_has_the_counts_of_its_original():
    histogram = Histogram((1.0, 2.0))
    histogram.add(1.5)
    copy = Histogram.of(histogram.bounds, histogram.counts, histogram.sum)
    histogram.add(1.5)
    assert (copy.counts, copy.sum) == ([0, 1, 0], 1.5)
