"""Draft for one session: merge what a worker drafts into the session's tree, and hand over to another draft.

When a draft is replaced, the worker of the new one reads the sequence while the old one goes on drafting. It takes over
once it has caught up, and if it cannot read the sequence nothing changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from edge_agent.drafting.drafter import DraftNode, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.pool import DraftPool
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.worker import DraftWorker
from outrider.core.constraint import GrammarState
from outrider.core.errors import ModelRefused, Overloaded
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import MAX_VOCABULARY
from outrider.core.tree import ROOT

_ENOUGH_UPDATES = 8
"""Updates after which a successor takes over although it lags behind: a slower draft would never catch up."""

_Lease = tuple[DraftPool, DraftWorker]
"""A worker and the pool that it returns to. Compared by identity: a worker that was returned may be taken again."""


class DraftSession:
    """Drafts for one session, on the event loop. `DraftManager.session` makes it.

    worker: of `pool`, to begin with; without one, nothing is drafted until the draft is replaced.

    The drafter's ids of its nodes become the session's ids here and nowhere else. Updates arrive late: a node's parent
    may have become a committed token meanwhile, or may be gone. The rules are those between device and verifier: what
    hangs below a dropped node is dropped.
    """

    busy = False
    """Whether all workers of the draft that the session should have were in use when it began."""
    grammar: Callable[[], GrammarState] | None = None
    """Returns the state of the session's grammar before the first token. To be set before `begin`."""
    on_failure: Callable[[], None] | None = None
    """Called when drafting has ended by a failure, and no other draft is about to take over."""
    _fallback: DraftPool | None = None
    """The draft that goes on after a failure, which stays told."""

    def __init__(self, session: DeviceSession, pool: DraftPool | None, worker: DraftWorker | None) -> None:
        self._session = session
        self._current = _lease(pool, worker)
        self._successor: _Lease | None = None
        """Reads the sequence, to take over from the current worker. It proposes nothing before."""
        self._successor_updates = 0
        self.pool = pool
        self._requested = pool
        """The draft that the session shall use in the end."""
        self._had_draft = self._current is not None
        self.failure = ""
        """Why drafting ended, or could not begin with the draft that the session should have."""
        self.vocabulary_size = MAX_VOCABULARY
        """Token ids at or beyond it are not the target's, and are never proposed."""
        self._plan: SpeculationPlan | None = None
        """None before `begin`."""
        self._worker_plan: SpeculationPlan | None = None
        """The plan that the current worker was given last."""
        self._on_change: Callable[[], None] = lambda: None
        self._on_handover: Callable[[float], None] = lambda _: None
        self._nodes: dict[int, int] = {}
        """The current drafter's id of a live node -> the session's id."""
        self._committed: dict[int, int] = {}
        """The current drafter's id of a node that became a token -> the position after it."""
        self._base = -1
        """Generated tokens that the current drafter had received at its last update."""
        self._resting = False
        """Whether the last update said that nothing more will come before a commit or another plan."""
        self._updated_at: float | None = None
        """Time of the last update, by the event loop's clock; None before the current worker has read the sequence."""
        self._replaced_at: float | None = None
        """Last update of the replaced draft, until the new one has sent its first."""
        self._ended = False

    @property
    def begun(self) -> bool:
        """Return whether `begin` was called."""
        return self._plan is not None

    @property
    def drafting(self) -> bool:
        """Return whether a worker drafts for the session."""
        return self._current is not None

    @property
    def release(self) -> str | None:
        """Release of the draft in use.

        It is "" once drafting was switched off; None where the session never had a draft.
        """
        if not self._had_draft:
            return None
        return self.pool.release if self.pool is not None else ""

    @property
    def name(self) -> str:
        """Name of the draft in use; empty for none."""
        return self.pool.name if self.pool is not None and self.release is not None else ""

    def rests(self, plan: SpeculationPlan, rtt_s: float) -> bool:
        """Return whether no nodes will come before the verifier's draft wait ends. rtt_s: to the verifier and back."""
        if not plan.speculates or self._current is None or self._updated_at is None:
            return True
        if not plan.waits:
            return False
        if self._resting and self._base == len(self._session.received):
            return True
        return not len(self._session.tree) and self._current[1].decode_s + rtt_s > plan.draft_wait_s

    def begin(self, plan: SpeculationPlan, on_change: Callable[[], None], on_handover: Callable[[float], None]) -> None:
        """Read the sequence as it stands, and draft.

        on_change: called when nodes were added, when the draft rests or fails, and when another draft takes over,
        before the first of its nodes. on_handover: receives, for each draft that took over from another one, the
        seconds between the last update of the old one and the first of the new one.
        """
        self._plan, self._on_change, self._on_handover = plan, on_change, on_handover
        if self._current is not None:
            self._worker_plan = plan
            self._read(self._current, plan)

    def replan(self, plan: SpeculationPlan) -> None:
        """Draft by another plan, within the room that the nodes of a replaced draft leave in the session's tree."""
        self._plan = plan
        if self._current is None:
            return
        foreign = len(self._session.tree) - len(self._nodes)
        nodes = max(0, min(plan.nodes, self._session.limits.nodes - foreign))
        plan = plan if nodes == plan.nodes else dataclasses.replace(plan, nodes=nodes)
        if plan != self._worker_plan:
            self._worker_plan = plan
            self._resting = False
            self._current[1].replan(plan)

    def commit(self, delivery: Delivery) -> None:
        """Follow the session, which has delivered tokens: nodes became tokens, and others were dropped."""
        first = len(self._session.received) - len(delivery.tokens)
        after = {node: first + i + 1 for i, node in enumerate(delivery.path)}
        for theirs, ours in list(self._nodes.items()):
            if ours in after:
                self._committed[theirs] = after[ours]
            if ours not in self._session.tree:
                del self._nodes[theirs]
        for lease in (self._current, self._successor):
            if lease is not None and delivery.tokens:
                lease[1].commit(delivery.tokens)
        if self._plan is not None:
            self.replan(self._plan)  # nodes of a replaced draft may have left room

    async def change_to(self, pool: DraftPool | None) -> None:
        """Change to another draft, or to none. Where all of its workers are in use, the session keeps what it has."""
        self._requested = pool
        if pool is self.pool:
            self._drop_successor()
            return
        try:
            successor = _lease(pool, await pool.take()) if pool is not None else None
        except (ModelRefused, Overloaded):
            return
        if self._ended or self._session.finished or self._requested is not pool:
            _give_back(successor)
            return
        self._drop_successor()
        if successor is None or self._plan is None:  # there is nothing to read
            self._hand_over(pool, successor)
        else:
            self._successor, self._successor_updates = successor, 0
            self._read(successor, dataclasses.replace(self._plan, nodes=0))

    async def fall_back(self, pool: DraftPool) -> None:
        """Change to a draft that goes on where the one that the session should have has failed."""
        self._fallback = pool
        await self.change_to(pool)

    def end(self) -> None:
        """Return the workers; nothing is drafted any more."""
        self._ended = True
        self._drop_successor()
        _give_back(self._current)
        self._current = None

    # --- updates

    def _read(self, lease: _Lease, plan: SpeculationPlan) -> None:
        """Let a worker read the sequence as it stands, and pass its reports on to the event loop."""
        session, loop = self._session, asyncio.get_running_loop()
        task = DraftTask(
            session.prompt,
            tuple(session.received),
            session.sampling,
            session.max_tokens,
            session.end_token_ids,
            self.grammar,
            session.min_tokens,
        )

        def report(news: DraftUpdate | str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the session has ended
                loop.call_soon_threadsafe(self._receive, lease, news)

        lease[1].begin(task, plan, report)

    def _receive(self, lease: _Lease, news: DraftUpdate | str) -> None:
        """Take in what a worker reports, unless it was returned meanwhile."""
        if self._session.finished:
            return
        if lease is self._successor:
            self._receive_from_successor(lease, news)
        elif lease is self._current:
            if isinstance(news, str):
                self.failure = news
                _give_back(lease)
                self._current = None
                self._check_drafting()
            else:
                now = self._note(news)
                self._merge(news)
                if self._replaced_at is not None:
                    self._on_handover(now - self._replaced_at)
                    self._replaced_at = None
            self._on_change()

    def _note(self, update: DraftUpdate) -> float:
        """Record how far the current drafter has read; return the time by the event loop's clock."""
        self._base, self._resting = update.base, update.resting
        self._updated_at = asyncio.get_running_loop().time()
        return self._updated_at

    def _merge(self, update: DraftUpdate) -> None:
        """Add the nodes that are still valid to the session's tree."""
        self._committed = {node: after for node, after in self._committed.items() if after >= update.base}
        for node in update.nodes:
            parent = self._parent(node, update.base)
            if parent is not None and node.token < self.vocabulary_size:
                present = self._session.tree.child(parent, node.token)
                ours = present if present is not None else self._session.add(parent, node.token)
                if ours is not None:
                    self._nodes[node.id] = ours

    def _parent(self, node: DraftNode, base: int) -> int | None:
        """Return the session's id of a node's parent; None for a node that is dropped or was committed meanwhile."""
        if node.parent in self._nodes:
            return self._nodes[node.parent]
        position = base if node.parent == ROOT else self._committed.get(node.parent)
        received = self._session.received
        if position is None:
            return None
        if position < len(received):
            if received[position] == node.token:
                self._committed[node.id] = position + 1
            return None
        return ROOT

    # --- handover

    def _receive_from_successor(self, successor: _Lease, news: DraftUpdate | str) -> None:
        """Hand over to the successor when it has caught up with the current worker; give it up where it fails."""
        if isinstance(news, str):
            self._drop_successor()
            self._check_drafting()
            return
        self._successor_updates += 1
        caught_up = self._current is None or news.base >= self._base
        if caught_up or self._successor_updates >= _ENOUGH_UPDATES:
            self._hand_over(successor[0], successor, news)

    def _hand_over(self, pool: DraftPool | None, successor: _Lease | None, update: DraftUpdate | None = None) -> None:
        """Use another draft from now on; the nodes of the old one stay in the tree. update: the successor's last."""
        previous, self._current, self._successor = self._current, successor, None
        self._replaced_at = self._updated_at if previous is not None else None
        _give_back(previous)
        self.pool = pool
        self._had_draft = True
        if pool is None or pool is not self._fallback:
            self.failure = ""
        self._nodes, self._committed, self._worker_plan, self._updated_at = {}, {}, None, None
        if update is not None:
            self._note(update)
        if self._plan is not None:
            self.replan(self._plan)
            self._on_change()

    def _check_drafting(self) -> None:
        """Tell of a failure that has left nobody to draft, now or soon."""
        if self._current is None and self._successor is None and self.on_failure is not None:
            self.on_failure()

    def _drop_successor(self) -> None:
        _give_back(self._successor)
        self._successor = None


def _lease(pool: DraftPool | None, worker: DraftWorker | None) -> _Lease | None:
    return (pool, worker) if pool is not None and worker is not None else None


def _give_back(lease: _Lease | None) -> None:
    """Return a worker to its pool."""
    if lease is not None:
        pool, worker = lease
        pool.give_back(worker)
