"""Test the thread that owns a draft: where it cannot begin, and where it must stop."""

from __future__ import annotations

import queue

import pytest
from scripted import ScriptedSource

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.cpu_budget import CpuBudget
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.worker import DraftWorker
from outrider.core.acceptance.calibrator import Calibrator

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


def test_who_has_used_its_share_drafts_no_further_and_catches_up_with_no_commit_before_its_rest_is_over() -> None:
    """On a clock that stands still a rest never ends by itself."""
    updates: queue.SimpleQueue[DraftUpdate | str] = queue.SimpleQueue()
    source = ScriptedSource()
    budget = CpuBudget(0.5, clock=lambda: 0.0)
    budget.spend(1e9)
    calibrated = CalibratedSource(source, Calibrator(), Calibrator(), WIDTHS)
    worker = DraftWorker(Draft("d"), lambda: Drafter([calibrated]), budget=budget)
    try:
        worker.begin(DraftTask((1, 2, 3)), PLAN, updates.put)
        assert updates.get(timeout=60) == DraftUpdate(0, (), resting=True)
        worker.commit([7])
        worker.commit([8])
        with pytest.raises(queue.Empty):
            updates.get(timeout=0.1)
        assert source.decodes == 0
        worker.end()  # which is obeyed at once, with all that came before
        worker.begin(DraftTask((1, 2, 3), received=(7, 8)), PLAN, updates.put)
        assert updates.get(timeout=60) == DraftUpdate(2, (), resting=True)
    finally:
        worker.close()
