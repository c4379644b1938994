"""Test that two sources rate a node's children together, and each calibrator learns from its own source."""

from __future__ import annotations

import pytest

from edge_agent.drafting.calibrated_source import NodeProposals
from edge_agent.drafting.sources.base import Proposal
from outrider.core.acceptance.calibrator import Calibrator

RIGHT, OTHER = 7, 8


def taught(model: Calibrator, ngram: Calibrator, *, agreed: int, contradicted: int) -> None:
    """Teach the source: n-grams were right wherever the model agreed, and wrong wherever it proposed other tokens."""
    for second, count in ((RIGHT, agreed), (99, contradicted)):
        for _ in range(count):
            proposals = NodeProposals()
            proposals.add(0, model, [Proposal(RIGHT, 0, 2.0), Proposal(OTHER, 1, 2.0)], 1, leads=True)
            proposals.add(1, ngram, [Proposal(second, 0, 1.5)], 1, leads=False)
            proposals.learn(RIGHT)


@pytest.fixture
def calibrators() -> tuple[Calibrator, Calibrator]:
    model, ngram = Calibrator(), Calibrator()
    taught(model, ngram, agreed=60, contradicted=60)
    return model, ngram


def ratings(model: Calibrator, ngram: Calibrator, second: int, *, asked: bool = True) -> dict[int, tuple[float, bool]]:
    proposals = NodeProposals()
    proposals.add(1, ngram, [Proposal(second, 0, 1.5)], 1, leads=False)
    if asked:
        proposals.add(0, model, [Proposal(RIGHT, 0, 2.0), Proposal(OTHER, 1, 2.0)], 1, leads=True)
    return proposals.children


def test_n_grams_are_less_probable_once_the_model_has_proposed_something_else(
    calibrators: tuple[Calibrator, Calibrator],
) -> None:
    before = ratings(*calibrators, 99, asked=False)[99][0]
    after = ratings(*calibrators, 99)[99][0]
    assert before == pytest.approx(0.5, abs=0.1)  # it was right half of the time, and nobody was asked
    assert after < 0.1


def test_the_order_of_the_sources_does_not_matter(calibrators: tuple[Calibrator, Calibrator]) -> None:
    model, ngram = calibrators
    proposals = NodeProposals()
    proposals.add(0, model, [Proposal(RIGHT, 0, 2.0), Proposal(OTHER, 1, 2.0)], 1, leads=True)
    proposals.add(1, ngram, [Proposal(99, 0, 1.5)], 1, leads=False)
    assert proposals.children == ratings(model, ngram, 99)


def test_the_first_proposal_of_the_leading_source_leads_whichever_source_has_it_too(
    calibrators: tuple[Calibrator, Calibrator],
) -> None:
    proposals = ratings(*calibrators, RIGHT)
    assert [proposals[token][1] for token in (RIGHT, OTHER)] == [True, False]
    assert not ratings(*calibrators, RIGHT, asked=False)[RIGHT][1]


def test_a_proposal_is_learned_from_at_the_depth_at_which_it_was_made() -> None:
    model = Calibrator()
    for _ in range(100):
        proposals = NodeProposals()
        proposals.add(0, model, [Proposal(RIGHT, 0, 2.0)], 5, leads=True)
        proposals.learn(OTHER)
    fresh = Calibrator()
    assert model.probability(0, 2.0, 5) < model.probability(0, 2.0, 1) < fresh.probability(0, 2.0, 1)


def test_a_source_is_compared_with_better_ones_only(calibrators: tuple[Calibrator, Calibrator]) -> None:
    model, _ = calibrators
    alone, beside = NodeProposals(), NodeProposals()
    for proposals in (alone, beside):
        proposals.add(0, model, [Proposal(RIGHT, 0, 2.0)], 1, leads=True)
    beside.add(1, Calibrator(), [Proposal(OTHER, 0, 2.0)], 1, leads=True)
    assert beside.children[RIGHT] == alone.children[RIGHT]


def test_a_token_of_several_sources_has_the_largest_estimate() -> None:
    sure, unsure = Calibrator(), Calibrator()
    for _ in range(200):
        sure.observe(0, 2.0, 1, True)
        unsure.observe(0, 2.0, 1, False)
    for first, second in ((sure, unsure), (unsure, sure)):
        proposals = NodeProposals()
        proposals.add(0, first, [Proposal(RIGHT, 0, 2.0)], 1, leads=True)
        proposals.add(1, second, [Proposal(RIGHT, 0, 2.0)], 1, leads=False)
        assert proposals.children[RIGHT][0] > 0.75


def test_the_spine_follows_the_best_of_the_models_that_were_asked() -> None:
    proposals = NodeProposals()
    proposals.add(1, Calibrator(), [Proposal(OTHER, 0, 2.0), Proposal(RIGHT, 1, 2.0)], 1, leads=True)
    assert [proposals.children[token][1] for token in (RIGHT, OTHER)] == [False, True]
    proposals.add(0, Calibrator(), [Proposal(RIGHT, 0, 2.0)], 1, leads=True)
    assert [proposals.children[token][1] for token in (RIGHT, OTHER)] == [True, False]
