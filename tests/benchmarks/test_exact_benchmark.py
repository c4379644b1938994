"""Test when the comparison of bits fails."""

from __future__ import annotations

from benchmarks.exact import BitComparison, failure

DIFFERS = BitComparison(rows=10, rows_differing=3)


def test_it_passes_where_exact_keeps_its_bits_and_the_control_does_not() -> None:
    assert failure({"float32": 0, "bfloat16": 0}, DIFFERS, "here") is None


def test_a_bit_that_differs_fails_it() -> None:
    assert "0 bits in float32, 7 bits in bfloat16" in str(failure({"float32": 0, "bfloat16": 7}, DIFFERS, "here"))


def test_a_control_that_does_not_differ_fails_it() -> None:
    assert "none of 10 rows of the control" in str(
        failure({"float32": 0, "bfloat16": 0}, BitComparison(rows=10), "here")
    )
