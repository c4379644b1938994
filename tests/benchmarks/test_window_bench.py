"""What benchmarks.window makes of outcomes."""

from __future__ import annotations

import pytest

from benchmarks.replay import Outcome
from benchmarks.window import MACHINES, Cell, delivered, interval, tell
from outrider.wire.v1 import coordinator_pb2


def outcome(seconds: float, tokens: int = 100, first_token_s: float = 0.1) -> Outcome:
    """Tokens at an even pace."""
    pause = (seconds - first_token_s) / (tokens - 1)
    return Outcome(
        tokens=tokens,
        steps=tokens // 2,
        first_token_s=first_token_s,
        seconds=seconds,
        gaps_ms=[1e3 * pause] * (tokens - 1),
        delivered_s=[50.0 + first_token_s + i * pause for i in range(tokens)],
        wire_up=40 * tokens,
        appends=tokens,
    )


def cell(streaming: list[float], adaptive: list[float], rounds: int = 2) -> Cell:
    """Seconds of each prompt's session."""
    return Cell([[outcome(s) for s in streaming]] * rounds, [[outcome(s) for s in adaptive]] * rounds)


def test_a_ratio_is_of_the_same_prompt_in_the_same_round() -> None:
    assert cell([4.0, 6.0], [2.0, 6.0]).ratios == {0: [2.0, 2.0], 1: [1.0, 1.0]}


def test_an_interval_holds_the_median_and_is_wide_where_prompts_differ() -> None:
    alike, apart = (interval({i: [value] for i, value in enumerate(each)}) for each in ([1.5] * 8, range(1, 9)))
    assert alike == (1.5, 1.5, 1.5)
    assert apart[1] < apart[0] == 4.5 < apart[2]


def test_first_tokens_and_gaps_are_compared_over_all_sessions() -> None:
    both = Cell([[outcome(4.0, first_token_s=0.2)]], [[outcome(2.0, first_token_s=0.1)]])
    assert both.over(0.5, "first_token_s") == pytest.approx(0.5)
    assert both.over(0.99, "gaps_ms") == pytest.approx(0.5)


def test_tokens_are_counted_from_the_sessions_begin() -> None:
    even = outcome(10.0, tokens=100, first_token_s=0.1)
    assert delivered(even, 0.0, 11.0) == 100
    assert delivered(even, 2.0, 4.0) == pytest.approx(20, abs=1)


def test_a_line_says_that_a_verifier_is_paced_and_what_was_decided(capsys) -> None:
    measured = cell([4.0, 6.0], [2.0, 3.0])
    measured.windows = {"s": coordinator_pb2.SessionWindow(k=4, depth=8, hits=0.75, speedup=1.9)}
    figures = tell(MACHINES[-1], "good", 50.0, measured)
    assert (figures["speedup"], figures["slowest"], figures["predicted"]) == (2.0, 2.0, 1.9)
    assert (figures["wire_up_per_token"], figures["messages_per_s"]) == (40.0, 40.0)
    said = capsys.readouterr().out
    assert said.startswith("PACED 80 + 0.05 n ms, 8 at once")
    assert "k 4.0, depth 8.0, hits 0.75, predicted 1.90x" in said
