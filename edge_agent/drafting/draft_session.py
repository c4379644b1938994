"""A draft at work for one session: what it grows is taken in, what is committed is passed on to it.

A session that changes its draft has two of them for a while: the one that drafts, and the one that still reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.drafting.drafter import DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.tree_merge import Intake
from edge_agent.drafting.worker import DraftFailed, DraftWorker
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import MAX_VOCABULARY

_READING_SHARE = 4
"""Of the nodes that a session may hold one in so many is for a draft that still reads: they can be kept free for it."""


@dataclass(frozen=True)
class Lent:
    """A worker for a session, and whose it is."""

    worker: DraftWorker
    release: str = ""
    """As DraftPool has it."""
    name: str = ""


class Drafting:
    """One worker at one session.

    hear: gets what the worker tells, on the event loop. follows: another one drafts still, and has nodes in the tree.
    """

    def __init__(
        self,
        lent: Lent,
        session: DeviceSession,
        hear: Callable[[Drafting, DraftUpdate | DraftFailed], None],
        *,
        follows: bool = False,
    ) -> None:
        self.lent = lent
        self._session = session
        self._intake = Intake(session, MAX_VOCABULARY)
        self._hear = hear
        self._begun = 0
        """How often it began to read: what it told of an earlier time is of another tree."""
        self._plan: SpeculationPlan | None = None
        self._crowded = False
        self._early: list[DraftUpdate] = []
        """Not yet taken in."""
        self.told = 0
        """How often it has told something."""
        self._follows = follows
        self.leads = not follows
        """Whether what it grows goes to the verifier."""
        self.heard_at: float | None = None
        """When it last told something, by the loop's clock; None before its prompt is read."""
        self.base = 0
        """Tokens that it knew of then."""
        self.rested_at = -1
        """Tokens received when it last said that it rests."""

    def begin(self, plan: SpeculationPlan, ends: frozenset[int]) -> None:
        """Read the sequence as it stands, and draft on from there."""
        session = self._session
        task = DraftTask(session.prompt, tuple(session.received), session.sampling, session.max_tokens, ends)
        loop = asyncio.get_running_loop()
        self._begun += 1
        begun = self._begun

        def tell(news: DraftUpdate | DraftFailed) -> None:
            if begun == self._begun:
                self._hear(self, news)

        def report(news: DraftUpdate | DraftFailed) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                loop.call_soon_threadsafe(tell, news)

        self._plan = plan
        self.lent.worker.begin(task, self._fitting(plan), report)

    def hold(self, growth: DraftUpdate) -> None:
        """Keep what cannot be taken in yet."""
        self.heard_at, self.base = asyncio.get_running_loop().time(), growth.base
        self._early.append(growth)
        self.told += 1

    def take_in(self, vocabulary_size: int) -> int:
        """Add what was held to the session's tree; returns how many nodes were new."""
        self._intake.vocabulary_size = vocabulary_size
        added = 0
        for growth in self._early:
            added += self._intake.add(growth)
            if growth.resting:
                self.rested_at = growth.base
        self._early = []
        return added

    def moved(self, delivery: Delivery) -> None:
        """The session has delivered tokens; the worker hears of them by `commit`."""
        self._intake.moved(delivery)

    def commit(self, tokens: tuple[int, ...]) -> None:
        self.lent.worker.commit(tokens)
        if self._plan is not None and self._crowded and self.leads:
            self.replan(self._plan)  # some of what stood in the way is gone

    def replan(self, plan: SpeculationPlan) -> None:
        self._plan = plan
        self.lent.worker.replan(self._fitting(plan))

    def lead(self, plan: SpeculationPlan, ends: frozenset[int]) -> None:
        """From now on what it grows goes to the verifier."""
        self.leads = True
        held = sum(len(growth.nodes) for growth in self._early)
        if held <= self._session.limits.nodes - len(self._session.tree):
            self.replan(plan)
            return
        self._early = []  # in part it would be of no use: below what is missing nothing can be sent
        self.heard_at = None
        self._intake = Intake(self._session, MAX_VOCABULARY)
        self.begin(plan, ends)

    def end(self) -> None:
        self.lent.worker.end()

    # --- room for what two of them have grown

    def _fitting(self, plan: SpeculationPlan) -> SpeculationPlan:
        """The plan without what another draft's nodes take of the session's tree: what finds no room there is lost."""
        if not self._follows:
            return plan
        most = self._session.limits.nodes
        room = (
            max(1, most // _READING_SHARE) if not self.leads else most - (len(self._session.tree) - self._intake.known)
        )
        self._crowded = room < plan.nodes
        return dataclasses.replace(plan, nodes=room) if self._crowded else plan
