"""Test what a draft without a model keeps of ended sessions, and what a session does when no thread can start."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.loading import ngram_draft
from edge_agent.drafting.pool import DraftPool
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.sources.ngram import NgramSource
from edge_agent.drafting.worker import DraftWorker
from outrider.core.errors import ModelRefused

PLAN = SpeculationPlan(nodes=16, depth=8, nodes_per_step=8, min_acceptance=0.1, draft_wait_s=0.0, step_s=0.01)
SESSIONS = 12
IDLE = 4
"""Idle workers that are kept."""


async def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@dataclass
class Sources:
    """The n-gram sources that were made, however long their workers live."""

    made: list[NgramSource]

    def reading(self) -> int:
        """Return how many of them hold a text."""
        return sum(bool(source._model._tail) for source in self.made)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    found = Sources([])
    begin = NgramSource.begin

    def noted(source: NgramSource, task: DraftTask) -> None:
        begin(source, task)
        if source not in found.made:
            found.made.append(source)

    monkeypatch.setattr(NgramSource, "begin", noted)
    return found


async def begun(pool: DraftPool, count: int) -> list[DraftWorker]:
    """Return the workers of so many sessions at once, each with a text of 1,000 tokens."""
    assert pool.draft is not None
    workers = [await pool.take(pool.draft) for _ in range(count)]
    for worker in workers:
        worker.begin(DraftTask(tuple(range(1000))), PLAN, lambda _: None)
    return workers


async def test_ended_sessions_leave_a_few_idle_workers_without_a_text(sources: Sources) -> None:
    before = set(threading.enumerate())

    def threads() -> int:
        return len([one for one in threading.enumerate() if one not in before and one.name == "outrider-draft"])

    pool = DraftPool(2)
    pool.draft = ngram_draft()
    for _ in range(2):
        workers = await begun(pool, SESSIONS)
        await eventually(lambda: sources.reading() >= SESSIONS)
        assert threads() == SESSIONS
        while workers:
            pool.give_back(workers.pop())
        await eventually(lambda: threads() == IDLE)
        assert pool.draft is not None and len(pool.draft.workers) == len(pool.draft.idle) == IDLE
        kept = [worker._drafter for worker in pool.draft.workers]
        held = {id(one.source) for drafter in kept if drafter is not None for one in drafter._sources}
        await eventually(lambda: not any(source._model._tail for source in sources.made if id(source) in held))  # noqa: B023
        sources.made.clear()
    await pool.close()
    assert threads() == 0


# --- no thread can start


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no draft's thread start until it is undone."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "outrider-draft":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


async def test_a_draft_is_refused_while_no_thread_can_start_and_not_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    draft = ngram_draft()
    pool = DraftPool(2)
    pool.draft = draft
    for _ in range(2):
        with pytest.raises(ModelRefused, match="can't start new thread"):
            await pool.take(draft)
    assert draft.failure == ""  # it is not to blame
    monkeypatch.undo()
    pool.give_back(await pool.take(draft))
    await pool.close()
