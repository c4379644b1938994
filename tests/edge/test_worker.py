"""Test the thread that owns a draft: where it cannot begin, and where it must stop."""

from __future__ import annotations

import pytest

from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.worker import DraftWorker

PLAN = SpeculationPlan(nodes=24, depth=8, nodes_per_step=10, min_acceptance=0.05, draft_wait_s=0.008, step_s=0.01)
WIDTHS = DecodeLatency(((1, 1e-3),))


def test_what_a_failing_build_had_taken_is_released() -> None:
    held: list[str] = []

    def build() -> Drafter:
        held.append("a context")
        raise MemoryError("measuring failed")

    worker = DraftWorker(Draft("d"), build, held.clear)
    with pytest.raises(MemoryError, match="measuring"):
        worker.ready.result(timeout=60)
    assert held == []
