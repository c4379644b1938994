"""Test that two sources rate a node's children together, and each calibrator learns from its own source."""

from __future__ import annotations

import pytest

from edge_agent.drafting.calibrated_source import NodeProposals
from edge_agent.drafting.sources.base import Proposal
from outrider.core.acceptance.calibrator import Calibrator

RIGHT, OTHER = 7, 8


def taught(model: Calibrator, lookup: Calibrator, *, agreed: int, contradicted: int) -> None:
    """Teach the source: look-up was right wherever the model agreed, and wrong wherever it proposed other tokens."""
    for second, count in ((RIGHT, agreed), (99, contradicted)):
        for _ in range(count):
            proposals = NodeProposals()
            proposals.add(model, [Proposal(RIGHT, 0, 2.0), Proposal(OTHER, 1, 2.0)], 1, leads=True)
            proposals.add(lookup, [Proposal(second, 0, 1.5)], 1, leads=False)
            proposals.learn(RIGHT)


@pytest.fixture
def calibrators() -> tuple[Calibrator, Calibrator]:
    model, lookup = Calibrator(), Calibrator()
    taught(model, lookup, agreed=60, contradicted=60)
    return model, lookup


def ratings(model: Calibrator, lookup: Calibrator, second: int, *, asked: bool = True) -> dict[int, tuple[float, bool]]:
    proposals = NodeProposals()
    proposals.add(lookup, [Proposal(second, 0, 1.5)], 1, leads=False)
    if asked:
        proposals.add(model, [Proposal(RIGHT, 0, 2.0), Proposal(OTHER, 1, 2.0)], 1, leads=True)
    return proposals.children


def test_look_up_is_less_probable_once_the_model_has_proposed_something_else(
    calibrators: tuple[Calibrator, Calibrator],
) -> None:
    before = ratings(*calibrators, 99, asked=False)[99][0]
    after = ratings(*calibrators, 99)[99][0]
    assert before == pytest.approx(0.5, abs=0.1)  # it was right half of the time, and nobody was asked
    assert after < 0.1


def test_and_more_once_the_model_agrees(calibrators: tuple[Calibrator, Calibrator]) -> None:
    assert ratings(*calibrators, RIGHT)[RIGHT][0] > 0.9 > ratings(*calibrators, RIGHT, asked=False)[RIGHT][0]


def test_the_order_of_the_sources_does_not_matter(calibrators: tuple[Calibrator, Calibrator]) -> None:
    model, lookup = calibrators
    proposals = NodeProposals()
    proposals.add(model, [Proposal(RIGHT, 0, 2.0), Proposal(OTHER, 1, 2.0)], 1, leads=True)
    proposals.add(lookup, [Proposal(99, 0, 1.5)], 1, leads=False)
    assert proposals.children == ratings(model, lookup, 99)


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
        proposals.add(model, [Proposal(RIGHT, 0, 2.0)], 5, leads=True)
        proposals.learn(OTHER)
    fresh = Calibrator()
    assert model.probability(0, 2.0, 5) < model.probability(0, 2.0, 1) < fresh.probability(0, 2.0, 1)
