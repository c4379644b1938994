"""Two drafts at one session: when the one has taken over from the other, and how long nobody drafted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from edge_agent.drafting.draft_session import Drafting, Lent
from edge_agent.drafting.drafter import DraftNode, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.handover import Desk
from edge_agent.drafting.worker import DraftFailed, DraftWorker
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import SessionLimits
from outrider.core.tree import ROOT

PLAN = SpeculationPlan(nodes=4, depth=4, nodes_per_step=4, min_acceptance=0.1, draft_wait_s=0.0, step_s=0.01)


class ByHand:
    """A worker whose growths are the test's."""

    def __init__(self) -> None:
        self.begun = 0
        self._report: Any = None

    def begin(self, task: object, plan: SpeculationPlan, report: Any) -> None:
        self.begun += 1
        self._report = report

    async def grow(self, *nodes: tuple[int, int, int]) -> None:
        self._report(DraftUpdate(0, tuple(DraftNode(*node) for node in nodes), False))
        await asyncio.sleep(0)

    def replan(self, plan: SpeculationPlan) -> None: ...
    def end(self) -> None: ...


class Pair:
    """A desk at which `new` reads to follow `old`. Four nodes find room."""

    def __init__(self) -> None:
        self.session = DeviceSession((1, 2, 3), max_tokens=50)
        self.session.attach(1, SessionLimits(nodes=4, depth=4, in_flight=8, run_ahead=8))
        self.old, self.new = ByHand(), ByHand()
        self.desk = Desk(self._lent(self.old), self.session, self.hear)
        self.desk.begin(PLAN, frozenset())

    def hear(self, drafting: Drafting, news: DraftUpdate | DraftFailed) -> None:
        assert isinstance(news, DraftUpdate)
        drafting.hold(news)
        if drafting is self.desk.present:
            drafting.take_in(1000)

    def follow(self) -> None:
        self.desk.follow(self._lent(self.new), PLAN, frozenset(), lambda _: None)

    def _lent(self, worker: ByHand) -> Lent:
        return Lent(cast(DraftWorker, worker), "a" * 64)


async def test_the_gap_is_known_at_once_where_what_the_new_one_has_read_finds_room() -> None:
    pair = Pair()
    pair.follow()
    await pair.old.grow((1, ROOT, 10))
    await asyncio.sleep(0.02)
    await pair.new.grow((1, ROOT, 20))
    pair.desk.swap(PLAN, frozenset())
    gap = pair.desk.gap()
    assert pair.new.begun == 1
    assert gap is not None and 0.02 <= gap < 1.0
    assert pair.desk.gap() is None  # told once


async def test_one_that_has_to_begin_anew_for_want_of_room_leaves_a_gap_until_it_has_grown_again() -> None:
    pair = Pair()
    pair.follow()
    await pair.old.grow((1, ROOT, 10), (2, 1, 11), (3, 2, 12))
    await pair.new.grow((1, ROOT, 20), (2, 1, 21))
    pair.desk.swap(PLAN, frozenset())
    assert pair.new.begun == 2
    assert pair.desk.gap() is None
    await asyncio.sleep(0.03)
    await pair.new.grow((1, ROOT, 20))
    gap = pair.desk.gap()
    assert gap is not None and 0.03 <= gap < 1.0


async def test_where_nobody_drafted_before_there_is_no_gap() -> None:
    pair = Pair()
    pair.desk.present = None
    pair.follow()
    await pair.new.grow((1, ROOT, 20))
    pair.desk.swap(PLAN, frozenset())
    assert pair.desk.gap() is None
