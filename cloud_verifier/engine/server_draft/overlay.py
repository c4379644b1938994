"""Add nodes of the verifier's own sources to a step: which sources pay, for which sessions, and how many nodes each.

The trees of all sources are merged with the device's nodes of a session (PendingNodes.offer), and the allocation policy
ranks all nodes of all sessions together. So a source's node never takes a row that a device's node is worth more for,
and where a row's time is worth more than any of its nodes it gets none. What is left to decide is whether a source is
asked at all, since its drafting takes time.

Sources draft as soon as a session's last tokens are known, before it is decided whether to wait for its device. What a
near device answers meanwhile is taken in before the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.interface import SessionRows, TargetExecutor
from cloud_verifier.engine.nodes import ProposedTree, SourceOutcome
from cloud_verifier.engine.row_allocation import AllocationPolicy, CostCurve
from cloud_verifier.engine.scheduler import StepPlan
from cloud_verifier.engine.server_draft.base import EvaluatedRows, ProposalRequest, ServerSource
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.session_history import tenant_acceptance
from cloud_verifier.engine.stats import MovingAverage
from cloud_verifier.engine.step_profiler import FURTHER_NODES, StepProfiler
from outrider.core.acceptance.node_acceptance import SURER
from outrider.core.verification import Verified

log = logging.getLogger(__name__)

MOST_NODES = 16
"""The most nodes that one source proposes for a session: each costs about 50 microseconds."""
SPARE_NODES = 2
"""Nodes that are proposed for each row that a session can expect: not all of them are worth one."""
LEAST_FLOOR, GREATEST_FLOOR = 0.03, 0.5
"""Bounds of the least path acceptance at which nodes are proposed. What is never proposed is never measured."""
FLOOR_SHARE = 0.7
"""Share of the least acceptance at which a node pays, as it was before any was added, to propose at."""
EXPLORE = 32
"""One step in so many proposes down to LEAST_FLOOR."""
TRIAL, PERIOD, TRIAL_SESSIONS = 8, 256, 8
"""Steps with drafting before it is judged, in each period if it does not pay; and the most sessions that are drafted
for in such a step."""


class Drafting:
    """Judges whether the time of drafting pays, by what it took and gained for a session.

    gain: mean tokens that it adds to a step of a session, less the price of their nodes. paused: whether it was last
    found not to pay, outside of a trial.
    """

    def __init__(self) -> None:
        self.gain = MovingAverage()
        self.seconds = MovingAverage()
        """Of drafting for a session, without the reading of prompts."""
        self.paused = False
        self._judged = 0

    @property
    def known(self) -> bool:
        """Return whether there were enough steps to judge."""
        return self._judged >= TRIAL

    def sessions_to_ask(self, sessions: int, step: int, token_s: float) -> int:
        """Return for how many of these sessions to draft in a step: all if it pays, else none, or few in a trial.

        token_s: seconds in which a token is committed otherwise.
        """
        pays = self.known and self.gain.value * token_s >= self.seconds.value
        trial = not self.known or step % PERIOD < TRIAL
        self.paused = not pays and not trial
        return sessions if pays else min(sessions, TRIAL_SESSIONS) if trial else 0

    def observe(self, gains: Sequence[float]) -> None:
        """Learn the gains of a step in each session."""
        self.gain.add(sum(gains) / len(gains))
        self._judged += 1


class _Source:
    """A source with what is known of its use."""

    def __init__(self, source: ServerSource) -> None:
        self.source = source
        self.prior = tenant_acceptance(expected=SURER)
        """Salt -> acceptance of its nodes in all sessions of the tenant."""
        self.drafting = {beside: Drafting() for beside in (False, True)}
        """By whether nodes of the session's device are there or expected: it may add little to them, and much where
        there are none."""
        self.observing_s = 0.0
        """Seconds in which it learned from the last step."""


class Overlay:
    """Adds nodes to every plan before its step, and learns from the verification after it. Not thread-safe."""

    def __init__(self, sources: Sequence[ServerSource], clock: Callable[[], float] = time.perf_counter) -> None:
        """Take sources with distinct names, the cheapest first. clock: measures what they take."""
        self._sources = [_Source(source) for source in sources]
        self._clock = clock
        self._last: list[tuple[SessionRows, Verified | None]] = []
        """Rows of the last step, and each session's path."""
        self._drafts: dict[str, tuple[bool, Mapping[str, ProposedTree]]] = {}
        """Session id -> whether nodes of its device were there or expected, and what each source that was asked has
        proposed, a tree without nodes if it found none; until its next commit."""
        self._gains: defaultdict[Drafting, list[float]] = defaultdict(list)
        """Tokens gained, less the price of their nodes, in each session of the last step."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sources that are in use."""
        return tuple(one.source.name for one in self._sources)

    @property
    def serves_without_device(self) -> bool:
        """Return whether a source drafts for sessions without nodes of their devices."""
        return any(not one.drafting[False].paused for one in self._sources)

    def draft(self, plan: StepPlan, live: Mapping[str, EngineSession], step: int, profiler: StepProfiler) -> bool:
        """Ask the sources about the sessions of a planned step that they were not asked about since their last commit.

        Return whether a source was asked. A session for which a device was waited in vain may be asked about again.
        """
        for drafting, gains in self._gains.items():
            drafting.observe(gains)
        self._gains.clear()
        ready, generating = _sessions(plan, live)
        if not plan.node_rows or not self._sources:
            return False
        near = plan.coming.union(a.session_id for a in plan.allocations if a.nodes)
        undrafted = [s for s in generating if self._is_undrafted(s, s.session_id in near)]
        if not undrafted:
            return False
        groups = {beside: sum((s.session_id in near) is beside for s in generating) for beside in (False, True)}
        cost, nodes = _step_cost(plan, profiler), {a.session_id: a.nodes for a in plan.allocations}
        commits = sum(1.0 + max(sum(s.acceptances()[: nodes[s.session_id]]), s.nodes.server_gain.value) for s in ready)
        step_s, floor = float(cost(np.zeros(1, np.int64))[0]), _floor(commits, cost)
        if step % EXPLORE == 0:
            floor = LEAST_FLOOR
        each = min(MOST_NODES, 2 + math.ceil(SPARE_NODES * plan.node_rows / len(generating)))
        trees: dict[str, dict[str, ProposedTree]] = {session.session_id: {} for session in undrafted}
        any_asked = False
        for one in list(self._sources):
            asked: list[EngineSession] = []
            for beside, sessions in groups.items():
                drafting = one.drafting[beside]
                otherwise = max(len(ready), commits - drafting.gain.value * sessions)
                most = drafting.sessions_to_ask(sessions, step, step_s / otherwise)
                asked += [s for s in undrafted if (s.session_id in near) is beside][:most]
            if not asked:
                continue
            any_asked, name = True, one.source.name
            known = [(s, s.nodes.acceptance_of(name, one.prior(s.salt))) for s in asked]
            requests = [
                ProposalRequest(s, min(each, s.nodes.most_together), floor, own, step_s / commits) for s, own in known
            ]
            for session_id, tree in self._proposed(one, requests, near).items():
                trees[session_id][name] = tree
        for session in undrafted:
            key = session.session_id
            self._drafts[key] = (key in near, trees[key])
        return any_asked

    def extend(
        self, plan: StepPlan, live: Mapping[str, EngineSession], policy: AllocationPolicy, profiler: StepProfiler
    ) -> StepPlan:
        """Return the plan with the nodes that were drafted, all nodes allocated anew by the policy."""
        ready, generating = _sessions(plan, live)
        drafts = [(s, self._drafts.get(s.session_id, (False, {}))[1]) for s in generating]
        offers = [(session, trees) for session, trees in drafts if any(trees.values())]
        if not offers or not plan.node_rows:
            return plan
        for session, trees in offers:
            session.nodes.offer(trees, session.directive)
        acceptances = [session.acceptances() for session in ready]
        counts, favoured = policy(acceptances, plan.node_rows, _step_cost(plan, profiler))
        nodes = {session.session_id: count for session, count in zip(ready, counts, strict=True)}
        allocations = tuple(replace(a, nodes=nodes.get(a.session_id, 0)) for a in plan.allocations)
        return replace(plan, allocations=allocations, favoured=tuple(ready[i].session_id for i in favoured))

    def committed(self, rows: SessionRows, verified: Verified | None, price: float) -> None:
        """Take what a session's rows of a step have brought, after its commit.

        verified: None while a prompt is read. price: tokens that the time of one more node would commit otherwise.
        """
        beside, trees = self._drafts.pop(rows.session.session_id, (False, {}))
        for one in self._sources if verified is not None else ():
            tree, drafting = trees.get(one.source.name), one.drafting[beside]
            # No trial is over by what finds nothing: n-grams find little at first, which takes little time.
            if tree or (tree is not None and drafting.known):
                outcome = rows.session.nodes.own.get(one.source.name, SourceOutcome())
                self._gains[drafting].append(outcome.gain - price * outcome.added)
        self._last.append((rows, verified))

    def observe(self, executor: TargetExecutor) -> None:
        """Let the sources learn from the rows of the last step, before the executor begins the next one.

        One that is paused learns from as many sessions as its next trial has, so that it is not judged by what it has
        missed.
        """
        last, self._last = self._last, []
        for one in list(self._sources):
            if not last or not one.source.wants_hidden:
                continue
            begun = self._clock()
            try:
                for session, rows in _evaluated(
                    executor, last[: TRIAL_SESSIONS if one.drafting[False].paused else None]
                ):
                    one.source.observe(session, rows)
            except Exception:
                self._failed(one)
            one.observing_s = self._clock() - begun

    def release(self, session_id: str) -> None:
        """Forget a session that has ended, and do not observe its last step."""
        self._last = [one for one in self._last if one[0].session.session_id != session_id]
        self._drafts.pop(session_id, None)
        for one in list(self._sources):
            try:
                one.source.release(session_id)
            except Exception:
                self._failed(one)

    def _is_undrafted(self, session: EngineSession, beside: bool) -> bool:
        """Return whether the sources are to be asked about a session. beside: whether it has nodes or expects some."""
        draft = self._drafts.get(session.session_id)
        return draft is None or (draft[0] and not beside and not any(draft[1].values()))

    def _proposed(
        self, one: _Source, requests: Sequence[ProposalRequest], near: frozenset[str]
    ) -> Mapping[str, ProposedTree]:
        """Return the trees of one source, and learn what they took; none if it fails.

        near: sessions for which nodes of their devices are there or expected.
        """
        begun = self._clock()
        try:
            trees = one.source.propose(requests)
        except Exception:
            self._failed(one)
            return {}
        seconds = self._clock() - begun - one.source.read_s + one.observing_s
        if trees:
            one.observing_s = 0.0
        for beside in {session_id in near for session_id in trees}:
            one.drafting[beside].seconds.add(seconds / len(trees))
        return trees

    def _failed(self, one: _Source) -> None:
        """Go on without a source, which has raised."""
        log.exception("the verifier's source of nodes %s fails; sessions go on without it", one.source.name)
        self._sources.remove(one)


def _sessions(plan: StepPlan, live: Mapping[str, EngineSession]) -> tuple[list[EngineSession], list[EngineSession]]:
    """Return the sessions whose known tokens the plan reads to the end, and those of them that sources serve."""
    ready = [live[a.session_id] for a in plan.allocations if a.chain == live[a.session_id].pending]
    # What a lossy rule lets the device's nodes change is the device's affair; other nodes shall change nothing.
    served = (s for s in ready if not s.lossy and not s.protocol.attach.undrafted)
    return ready, [s for s in served if s.pending == 1 and s.left > 1 and s.nodes.most_together]


def _step_cost(plan: StepPlan, profiler: StepProfiler) -> CostCurve:
    """Return the seconds of the planned step by its nodes."""
    filled, sessions = sum(a.chain for a in plan.allocations), len(plan.allocations)

    def cost(nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        return profiler.between_s + profiler.cost.curve(filled + nodes, sessions)

    return cost


def _floor(commits: float, cost: CostCurve) -> float:
    """Return the least path acceptance at which nodes are proposed: near what a node's time would commit otherwise."""
    plain, more = map(float, cost(np.array([0, FURTHER_NODES])))
    price = commits / plain * (more - plain) / FURTHER_NODES if plain > 0.0 else 0.0
    return min(GREATEST_FLOOR, max(LEAST_FLOOR, FLOOR_SHARE * price))


def _evaluated(
    executor: TargetExecutor, last: Sequence[tuple[SessionRows, Verified | None]]
) -> list[tuple[EngineSession, EvaluatedRows]]:
    """Return the rows of the last step with their hidden states, of sessions that have generated."""
    found = []
    for rows, verified in last:
        hidden = executor.hidden_states(rows.session) if verified is not None else None
        if verified is None or hidden is None:
            continue
        session, nodes = rows.session, rows.batch.tokens if rows.batch is not None else ()
        before = len(session.tokens) - len(verified.tokens)
        tokens = (*session.tokens[before - rows.chain : before], *nodes)
        found.append((session, EvaluatedRows(tokens, rows.chain, hidden, verified.rows)))
    return found
