"""Test prompt look-up: it proposes the token after the longest recent match."""

from __future__ import annotations

from edge_agent.drafting.sources.base import DraftTask, NodeContext
from edge_agent.drafting.sources.ngram import PromptLookup


def look_up(source: PromptLookup, *path: int) -> list[int]:
    return [p.token for p in source.expand([NodeContext(len(path), 0, path[-1] if path else -1, 0, path)])[0]]


def began(*prompt: int) -> PromptLookup:
    source = PromptLookup()
    source.begin(DraftTask(prompt))
    return source


def test_it_proposes_what_followed_last_time() -> None:
    assert look_up(began(1, 2, 3, 4, 1, 2)) == [3]


def test_it_follows_a_path_that_is_not_committed_yet() -> None:
    source = began(1, 2, 3, 4, 9, 1)
    assert look_up(source, 2) == [3]
    assert look_up(source, 2, 3) == [4]


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    assert look_up(began(7, 8, 1, 2, 3, 0, 1, 2, 4, 7, 8, 1, 2)) == [3]


def test_of_equal_matches_the_most_recent_wins() -> None:
    assert look_up(began(5, 1, 2, 3, 6, 1, 2, 4, 0, 1, 2)) == [4]


def test_without_a_match_of_two_tokens_it_is_silent() -> None:
    assert look_up(began(1, 2, 3, 9, 2)) == []
    assert look_up(began(1)) == []


def test_committed_tokens_join_the_text() -> None:
    source = began(1, 2)
    source.advance([], [3, 4, 1])
    source.advance([], [2])
    assert look_up(source) == [3]


def test_a_longer_match_has_a_greater_margin() -> None:
    source = began(1, 2, 3, 4, 5, 0, 1, 2, 3, 4)
    short = began(9, 4, 5, 0, 8, 9, 4)
    margin = source.expand([NodeContext(0, 0, -1, 0, ())])[0][0].margin
    assert margin > short.expand([NodeContext(0, 0, -1, 0, ())])[0][0].margin


def test_a_new_session_remembers_nothing() -> None:
    source = began(1, 2, 3, 1, 2)
    source.begin(DraftTask((1, 2)))
    assert look_up(source) == []
