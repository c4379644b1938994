"""Draft for one session: merge what a worker drafts into the session's tree, and hand over to another draft.

When a draft is replaced, the worker of the new one reads the sequence while the old one goes on drafting. It takes over
once it has read it, and if it cannot read the sequence nothing changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_agent.drafting.drafter import DraftNode, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.worker import DraftWorker
from outrider.core.constraint import GrammarState
from outrider.core.errors import ModelRefused, Overloaded
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import MAX_VOCABULARY
from outrider.core.tree import ROOT

if TYPE_CHECKING:
    from edge_agent.drafting.pool import DraftPool

_QUICKEST_S = 1e-4
"""Time of a level that free sources draft alone, which is not measured."""


@dataclass(eq=False)
class _Lease:
    """A worker, for as long as this session has it, and how far it is: one that was given back may be taken again."""

    worker: DraftWorker
    plan: SpeculationPlan | None = None
    """The plan that it was given last."""
    nodes: dict[int, int] = field(default_factory=dict)
    """The drafter's id of a live node -> the session's id."""
    committed: dict[int, int] = field(default_factory=dict)
    """The drafter's id of a node that became a token -> the position after it."""
    base: int = -1
    """Generated tokens that the drafter had received at its last update."""
    resting: bool = False
    """Whether the last update said that nothing more will come before a commit or another plan."""
    updated_at: float | None = None
    """Time of the last update, by the event loop's clock; None before the worker has read the sequence."""

    def note(self, update: DraftUpdate) -> None:
        """Record how far the drafter is."""
        self.base, self.resting = update.base, update.resting
        self.updated_at = asyncio.get_running_loop().time()


class DraftSession:
    """Drafts for one session, on the event loop. `DraftPool.session` makes it.

    The drafter's ids of its nodes become the session's ids here and nowhere else. Updates arrive late: a node's parent
    may have become a committed token meanwhile, or may be gone. The rules are those between device and verifier: what
    hangs below a dropped node is dropped.
    """

    def __init__(self, session: DeviceSession, pool: DraftPool) -> None:
        self._session = session
        self._pool = pool
        self.draft: Draft | None = None
        """The draft in use, or the one that has failed; None without one."""
        self.failure = ""
        """Why drafting ended, or could not begin with the draft that the session should have."""
        self.busy = False
        """Whether all workers of the draft that the session should have were in use when it began."""
        self.grammar: Callable[[], GrammarState] | None = None
        """Returns the state of the session's grammar before the first token. To be set before `begin`."""
        self.vocabulary_size = MAX_VOCABULARY
        """Token ids at or beyond it are not the target's, and are never proposed."""
        self._current: _Lease | None = None
        self._successor: _Lease | None = None
        """Reads the sequence, to take over from the current worker. It proposes nothing before."""
        self._requested: Draft | None = None
        """The draft that the session shall use in the end."""
        self._had_draft = False
        self._plan: SpeculationPlan | None = None
        """None before `begin`."""
        self._on_change: Callable[[], None] = lambda: None
        self._on_handover: Callable[[float], None] = lambda _: None
        self._replaced_at: float | None = None
        """Last update of the replaced draft, until the new one has sent its first."""
        self._ended = False

    @property
    def begun(self) -> bool:
        return self._plan is not None

    @property
    def drafting(self) -> bool:
        return self._current is not None

    @property
    def release(self) -> str | None:
        """Release of the draft in use.

        It is "" once drafting was switched off; None where the session never had a draft.
        """
        if not self._had_draft:
            return None
        return self.draft.release if self.draft is not None else ""

    @property
    def name(self) -> str:
        """Name of the draft in use; empty for none."""
        return self.draft.name if self.draft is not None else ""

    def level_ms(self) -> float:
        """Return the time in milliseconds in which one level of the tree is drafted; 0 where nothing drafts."""
        level_s = self._current.worker.decode_s if self._current is not None else math.inf
        return 1000.0 * max(_QUICKEST_S, level_s) if level_s < math.inf else 0.0

    def use(self, worker: DraftWorker) -> None:
        """Draft with this worker, which the session gives back."""
        self._hand_over(_Lease(worker))

    def rests(self, plan: SpeculationPlan, rtt_s: float) -> bool:
        """Return whether no nodes will come before the verifier's draft wait ends. rtt_s: to the verifier and back."""
        current = self._current
        if not plan.speculates or current is None or current.updated_at is None:
            return True
        if not plan.waits:
            return False
        if current.resting and current.base == len(self._session.received):
            return True
        return not len(self._session.tree) and current.worker.decode_s + rtt_s > plan.draft_wait_s

    def begin(self, plan: SpeculationPlan, on_change: Callable[[], None], on_handover: Callable[[float], None]) -> None:
        """Read the sequence as it stands, and draft.

        on_change: called when nodes were added, when the draft rests or fails, and when another draft takes over,
        before the first of its nodes. on_handover: receives, for each draft that took over from another one, the
        seconds between the last update of the old one and the first of the new one.
        """
        self._plan, self._on_change, self._on_handover = plan, on_change, on_handover
        if self._current is not None:
            self._read(self._current, plan)

    def replan(self, plan: SpeculationPlan) -> None:
        """Draft by another plan, within the room that the nodes of a replaced draft leave in the session's tree."""
        self._plan, current = plan, self._current
        if current is None:
            return
        foreign = len(self._session.tree) - len(current.nodes)
        nodes = max(0, min(plan.nodes, self._session.limits.nodes - foreign))
        plan = plan if nodes == plan.nodes else dataclasses.replace(plan, nodes=nodes)
        if plan != current.plan:
            current.plan, current.resting = plan, False
            current.worker.replan(plan)

    def commit(self, delivery: Delivery) -> None:
        """Follow the session, which has delivered tokens: nodes became tokens, and others were dropped."""
        first = len(self._session.received) - len(delivery.tokens)
        after = {node: first + i + 1 for i, node in enumerate(delivery.path)}
        for lease in (self._current, self._successor):
            if lease is None:
                continue
            for theirs, ours in list(lease.nodes.items()):
                if ours in after:
                    lease.committed[theirs] = after[ours]
                if ours not in self._session.tree:
                    del lease.nodes[theirs]
            if delivery.tokens:
                lease.worker.commit(delivery.tokens)
        if self._plan is not None:
            self.replan(self._plan)  # nodes of a replaced draft may have left room

    async def change_to(self, draft: Draft | None) -> None:
        """Change to another draft, or to none. Where all of its workers are in use, the session keeps what it has."""
        self._requested = draft
        if draft is self.draft:
            self._drop_successor()
            return
        try:
            successor = _Lease(await self._pool.take(draft)) if draft is not None else None
        except (ModelRefused, Overloaded):
            return
        if self._ended or self._session.finished or self._requested is not draft:
            self._give_back(successor)
            return
        self._drop_successor()
        if successor is None or self._plan is None:  # there is nothing to read
            self._hand_over(successor)
        else:
            self._successor = successor
            self._read(successor, dataclasses.replace(self._plan, nodes=0))

    def end(self) -> None:
        """Return the workers; nothing is drafted any more."""
        self._ended = True
        self._drop_successor()
        self._give_back(self._current)
        self._current = None

    # --- updates

    def _read(self, lease: _Lease, plan: SpeculationPlan) -> None:
        """Let a worker read the sequence as it stands, and pass its reports on to the event loop."""
        loop = asyncio.get_running_loop()

        def report(news: DraftUpdate | str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the session has ended
                loop.call_soon_threadsafe(self._receive, lease, news)

        lease.plan = plan
        lease.worker.begin(DraftTask.of(self._session, self.grammar), plan, report)

    def _receive(self, lease: _Lease, news: DraftUpdate | str) -> None:
        """Take in what a worker reports, unless it was returned meanwhile."""
        if self._session.finished:
            return
        if lease is self._successor:
            if not isinstance(news, str):
                lease.note(news)
                self._hand_over(lease)
            else:  # it cannot read the sequence
                self._drop_successor()
                if self._current is None:
                    self._give_up(lease, news)
        elif lease is self._current:
            if isinstance(news, str):
                self._give_back(lease)
                self._current = None
                self._give_up(lease, news)
            else:
                lease.note(news)
                self._merge(lease, news)
                if self._replaced_at is not None and lease.updated_at is not None:
                    self._on_handover(lease.updated_at - self._replaced_at)
                    self._replaced_at = None
                self._on_change()

    def _merge(self, lease: _Lease, update: DraftUpdate) -> None:
        """Add the nodes that are still valid to the session's tree."""
        lease.committed = {node: after for node, after in lease.committed.items() if after >= update.base}
        for node in update.nodes:
            parent = self._parent(lease, node)
            if parent is not None and node.token < self.vocabulary_size:
                present = self._session.tree.child(parent, node.token)
                ours = present if present is not None else self._session.add(parent, node.token)
                if ours is not None:
                    lease.nodes[node.id] = ours

    def _parent(self, lease: _Lease, node: DraftNode) -> int | None:
        """Return the session's id of a node's parent; None for a node that is dropped or was committed meanwhile."""
        if node.parent in lease.nodes:
            return lease.nodes[node.parent]
        position = lease.base if node.parent == ROOT else lease.committed.get(node.parent)
        received = self._session.received
        if position is None:
            return None
        if position < len(received):
            if received[position] == node.token:
                lease.committed[node.id] = position + 1
            return None
        return ROOT

    # --- handover

    def _hand_over(self, successor: _Lease | None) -> None:
        """Use another draft from now on; the nodes of the old one stay in the tree."""
        previous, self._current, self._successor = self._current, successor, None
        self._replaced_at = previous.updated_at if previous is not None else None
        self._give_back(previous)
        self.draft = successor.worker.draft if successor is not None else None
        self._had_draft = True
        if self.draft is None or self.draft.has_model:
            self.failure = ""
        if self._plan is not None:
            self.replan(self._plan)
            self._on_change()

    def _give_up(self, failed: _Lease, why: str) -> None:
        """Note a failure after which nothing drafts. Unless a successor reads already, n-grams take over if they can.

        They are not asked again once they are what has failed: they would fail the same way, without end.
        """
        self.draft, self.failure = failed.worker.draft, why
        if self._successor is None:
            self._pool.fall_back(self)
        self._on_change()

    def _drop_successor(self) -> None:
        self._give_back(self._successor)
        self._successor = None

    def _give_back(self, lease: _Lease | None) -> None:
        if lease is not None:
            self._pool.give_back(lease.worker)
