"""Test the source of n-grams: it proposes what followed the longest contexts in the text."""

from __future__ import annotations

import numpy as np

from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.sampling import SamplingParams


def proposals(source: NgramSource, *path: int, position: int = 0) -> list[Proposal]:
    return source.expand([NodeContext(len(path), 0, path[-1] if path else -1, position, path)])[0]


def tokens(source: NgramSource, *path: int) -> list[int]:
    return [proposal.token for proposal in proposals(source, *path)]


def began(*prompt: int) -> NgramSource:
    source = NgramSource()
    source.begin(DraftTask(prompt))
    return source


def test_it_follows_a_path_that_is_not_committed_yet() -> None:
    source = began(1, 2, 3, 4, 9, 1)
    assert tokens(source, 2) == [3]
    assert tokens(source, 2, 3) == [4]


def test_the_longest_context_wins_over_a_more_recent_one_which_is_second() -> None:
    assert tokens(began(7, 8, 1, 2, 3, 0, 1, 2, 4, 7, 8, 1, 2)) == [3, 4]


def test_committed_tokens_join_the_text() -> None:
    source = began(1, 2)
    source.advance([], [3, 4, 1])
    source.advance([], [2])
    assert tokens(source) == [3]


def test_a_new_session_remembers_nothing() -> None:
    source = began(1, 2, 3, 1, 2)
    source.begin(DraftTask((1, 2)))
    assert tokens(source) == []


def test_sampled_proposals_are_coupled_to_the_noise_of_the_session() -> None:
    prompt = (1, 5, 1, 6, 1)  # 5 and 6 followed equally often
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        source = NgramSource()
        source.begin(DraftTask(prompt, sampling=sampling))
        noise = gumbel(position_key(session_key(seed, prompt), 3), np.array([5, 6]))
        assert proposals(source, position=3)[0].token == (5 if noise[0] > noise[1] else 6)


def test_a_token_that_a_bias_all_but_forbids_is_not_proposed() -> None:
    text = (1, 5, 1, 5, 1, 6, 1)
    source = NgramSource()
    source.begin(DraftTask(text, sampling=SamplingParams(logit_bias=((5, -100.0), (6, -99.0)))))
    assert tokens(source) == [6]
    source.begin(DraftTask(text))
    assert tokens(source) == [5, 6]
