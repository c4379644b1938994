"""Add nodes of the verifier's own sources to a step: which sources pay, for which sessions, and how many nodes each.

The trees of all sources are merged with the device's nodes of a session (PendingNodes.offer), and the allocation policy
ranks all nodes of all sessions together. So a source's node never takes a row that a device's node is worth more for,
and where a row's time is worth more than any of its nodes it gets none.

Sources draft as soon as a session's last tokens are known, before it is decided whether to wait for its device. What a
near device answers meanwhile is taken in before the step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.interface import SessionRows, TargetExecutor
from cloud_verifier.engine.row_allocation import AllocationPolicy, CostCurve
from cloud_verifier.engine.scheduler import StepPlan
from cloud_verifier.engine.server_draft.base import (
    USUAL_TOKENS,
    EvaluatedRows,
    ProposalRequest,
    ProposedTree,
    ServerSource,
)
from cloud_verifier.engine.server_draft.policy import TRIAL, TRIAL_SESSIONS, DraftingTime, DraftPolicy
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.session_history import tenant_acceptance
from cloud_verifier.engine.stats import MovingAverage
from cloud_verifier.engine.step_profiler import FURTHER_NODES, StepProfiler
from outrider.core.acceptance.node_acceptance import KINDS, SURER, NodeAcceptance
from outrider.core.tree import TokenTree
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
FAILED_PAUSE = 64
"""Steps without a source that has failed; each further failure in a row doubles them."""
MOST_FAILURES = 3
"""Failures in a row, after which a source is not asked again."""


@dataclass(eq=False)
class _Source:
    """A source with what is known of its use."""

    source: ServerSource
    prior: Callable[[str], NodeAcceptance]
    """Salt -> acceptance of its nodes in all sessions of the tenant."""
    time: DraftingTime = field(default_factory=DraftingTime)
    outcomes: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {False: [], True: []})
    """(nodes that it alone proposed, tokens gained) of each session of the last step that it proposed for, by whether
    nodes of the device were there or expected."""
    answered: dict[bool, MovingAverage] = field(default_factory=lambda: {False: MovingAverage(), True: MovingAverage()})
    """Share of the sessions it was asked about that it had nodes for, likewise."""
    empty: int = 0
    """Trees without a node."""
    observing_s: float = 0.0
    """Seconds in which it learned from the last step."""
    failures: int = 0
    """In a row: without FAILED_PAUSE steps between the end of one's pause and the next."""
    resumes: int = 0
    """Number of the step at which it is asked again after a failure."""

    def __post_init__(self) -> None:
        self.policies = {beside: DraftPolicy(self.time) for beside in (False, True)}
        """Whether nodes of the device are there or expected beside its own -> whether it pays: it may add little to
        them, and much where there are none."""
        for share in self.answered.values():
            share.add(1.0)

    def gain(self, beside: bool) -> float:
        """Return the tokens that it is expected to add to the next step of a session."""
        return self.policies[beside].expected_gain * self.answered[beside].value


@dataclass(frozen=True)
class _Draft:
    """Holds what the sources propose for the next step of a session."""

    length: int
    """Number of the session's tokens then."""
    beside: bool
    """Whether nodes of its device were there or expected."""
    trees: Mapping[str, tuple[TokenTree, Mapping[int, int]]]
    """Tree and kinds of its nodes by source."""


class Overlay:
    """Adds nodes to every plan before its step, and learns from the verification after it. Not thread-safe."""

    def __init__(self, sources: Sequence[ServerSource], clock: Callable[[], float] = time.perf_counter) -> None:
        """Take sources with distinct names, the cheapest first. clock: measures what they take."""
        self._sources = [_Source(source, tenant_acceptance(expected=SURER)) for source in sources]
        self._clock = clock
        self._last: list[tuple[SessionRows, Verified | None]] = []
        """Rows of the last step, and each session's path."""
        self._step = 0
        """Number of the step that was drafted for last."""
        self._drafts: dict[str, _Draft] = {}
        """Session id -> what it was last asked for, until its next commit."""
        self._session_s = {False: MovingAverage(), True: MovingAverage()}
        """Seconds of drafting for a session in a step, by whether nodes of its device are there or expected."""
        self._drafted_s = {False: 0.0, True: 0.0}
        """Seconds of drafting in the present call, likewise."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sources that are in use."""
        return tuple(one.source.name for one in self._sources)

    @property
    def saved_s(self) -> float:
        """Return the seconds of drafting for a session that nodes of its device save."""
        return max(0.0, self._session_s[False].value - self._session_s[True].value)

    @property
    def has_drafted(self) -> bool:
        """Return whether sources were asked about sessions of the next step."""
        return bool(self._drafts)

    @property
    def serves_without_device(self) -> bool:
        """Return whether a source drafts for sessions without nodes of their devices."""
        return any(not one.policies[False].paused and self._step >= one.resumes for one in self._sources)

    def draft(
        self,
        plan: StepPlan,
        live: Mapping[str, EngineSession],
        step: int,
        profiler: StepProfiler,
        *,
        exploring: bool = False,
    ) -> bool:
        """Ask the sources about the sessions of a planned step that they were not asked about since their last commit.

        Return whether a source was asked. A session for which a device was waited in vain may be asked about again.
        exploring: whether nodes are proposed that hardly pay, so that they are measured.
        """
        self._learn_outcomes()
        self._step = step
        ready, generating = _sessions(plan, live)
        if not generating or not plan.node_rows or not self._sources:
            return False
        near = plan.coming.union(a.session_id for a in plan.allocations if a.nodes)
        undrafted = [s for s in generating if self._is_undrafted(s, s.session_id in near)]
        if not undrafted:
            return False
        groups = {beside: [s for s in generating if (s.session_id in near) is beside] for beside in (False, True)}
        drafting = {beside: [s for s in group if s in undrafted] for beside, group in groups.items()}
        trees, asked = self._proposed(plan, ready, groups, drafting, _step_cost(plan, profiler), exploring=exploring)
        for session in undrafted:
            key = session.session_id
            self._drafts[key] = _Draft(len(session.tokens), key in near, trees.get(key, {}))
        return asked

    def extend(
        self, plan: StepPlan, live: Mapping[str, EngineSession], policy: AllocationPolicy, profiler: StepProfiler
    ) -> StepPlan:
        """Return the plan with the nodes that were drafted, all nodes allocated anew by the policy."""
        ready, generating = _sessions(plan, live)
        drafts = [(s, self._drafts[s.session_id]) for s in generating if s.session_id in self._drafts]
        offers = [(s, draft.trees) for s, draft in drafts if draft.trees and draft.length == len(s.tokens)]
        if not offers or not plan.node_rows:
            return plan
        for session, trees in offers:
            session.nodes.offer(trees, session.directive)
        acceptances = [session.acceptances() for session in ready]
        counts, favoured = policy(acceptances, plan.node_rows, _step_cost(plan, profiler), 0.0)
        nodes = {session.session_id: count for session, count in zip(ready, counts, strict=True)}
        allocations = tuple(replace(a, nodes=nodes.get(a.session_id, 0)) for a in plan.allocations)
        return replace(plan, allocations=allocations, favoured=tuple(ready[i].session_id for i in favoured))

    def _is_undrafted(self, session: EngineSession, beside: bool) -> bool:
        """Return whether the sources are to be asked about a session. beside: whether it has nodes or expects some."""
        draft = self._drafts.get(session.session_id)
        if draft is None or draft.length != len(session.tokens):
            return True
        return draft.beside and not beside and not draft.trees

    def committed(self, rows: SessionRows, verified: Verified | None) -> None:
        """Take what a session's rows of a step have brought, after its commit.

        verified: None while a prompt is read.
        """
        draft = self._drafts.pop(rows.session.session_id, None)
        outcomes = rows.session.nodes.outcomes if verified is not None else {}
        for one in self._sources:
            outcome = outcomes.get(one.source.name)
            if outcome is not None and draft is not None:
                one.outcomes[draft.beside].append((outcome.alone, outcome.gain))
        self._last.append((rows, verified))

    def observe(self, executor: TargetExecutor) -> None:
        """Let the sources learn from the rows of the last step, before the executor begins the next one.

        One that is paused learns from as many sessions as its next trial has, so that it is not judged by what it has
        missed.
        """
        last, self._last = self._last, []
        for one in list(self._sources):
            source = one.source
            if not last or self._step < one.resumes or not source.wants_hidden:
                continue
            seen = last[:TRIAL_SESSIONS] if one.policies[False].pauses_in(self._step) else last
            begun = self._clock()
            try:
                for session, rows in _evaluated(executor, seen):
                    source.observe(session, rows)
            except Exception:
                self._failed(one, [rows.session.session_id for rows, _ in last])
            one.observing_s = self._clock() - begun

    def release(self, session_id: str) -> None:
        """Forget a session that has ended, and do not observe its last step."""
        self._last = [one for one in self._last if one[0].session.session_id != session_id]
        self._drafts.pop(session_id, None)
        for one in list(self._sources):
            try:
                one.source.release(session_id)
            except Exception:
                self._failed(one, [])

    def _proposed(
        self,
        plan: StepPlan,
        ready: Sequence[EngineSession],
        groups: Mapping[bool, Sequence[EngineSession]],
        drafting: Mapping[bool, Sequence[EngineSession]],
        cost: CostCurve,
        *,
        exploring: bool,
    ) -> tuple[dict[str, dict[str, tuple[TokenTree, Mapping[int, int]]]], bool]:
        """Return trees and the kinds of their nodes by session id and source, of the sources that pay, and whether any
        source was asked.

        groups: the sessions that generate, by whether nodes of their devices are there or expected. drafting: those of
        them to ask about.
        """
        beside = frozenset(session.session_id for session in drafting[True])
        device_nodes = {a.session_id: a.nodes for a in plan.allocations}
        committed = len(ready) + sum(sum(s.acceptances()[: device_nodes[s.session_id]]) for s in ready)
        taken = sum(device_nodes.values())
        gains = {
            id(one): sum(one.gain(of_device) * len(group) for of_device, group in groups.items())
            for one in self._sources
        }
        floor = _floor(committed + sum(gains.values()), cost, exploring=exploring)
        token_s = float(cost(np.zeros(1, np.int64))[0]) / (committed + sum(gains.values()))
        each = min(MOST_NODES, 2 + math.ceil(SPARE_NODES * plan.node_rows / sum(map(len, groups.values()))))
        trees: dict[str, dict[str, tuple[TokenTree, Mapping[int, int]]]] = {}
        may_pause, any_asked = {False, True}, False
        self._drafted_s = {False: 0.0, True: 0.0}
        for one in list(self._sources):
            if self._step < one.resumes:
                continue
            commits = committed + sum(gains.values()) - gains[id(one)]
            try:
                asked = self._worth_asking(one, groups, drafting, commits, cost, taken, may_pause)
            except Exception:
                self._failed(one, [session.session_id for group in drafting.values() for session in group])
                continue
            if not asked:
                continue
            any_asked, name = True, one.source.name
            known = [(s, s.nodes.acceptance_of(name, one.prior(s.salt))) for s in asked]
            requests = [ProposalRequest(s, min(each, s.nodes.most_together), floor, own, token_s) for s, own in known]
            for session_id, tree in self._asked(one, requests, beside).items():
                trees.setdefault(session_id, {})[name] = tree, tree.kinds
        for of_device, group in drafting.items():
            if group:
                self._session_s[of_device].add(self._drafted_s[of_device] / len(group))
        return trees, any_asked

    def _worth_asking(
        self,
        one: _Source,
        groups: Mapping[bool, Sequence[EngineSession]],
        drafting: Mapping[bool, Sequence[EngineSession]],
        commits: float,
        cost: CostCurve,
        taken: int,
        may_pause: set[bool],
    ) -> list[EngineSession]:
        """Return the sessions to ask a source about: of each group in which it pays, or a few of it during a trial.

        groups, drafting: as in `_proposed`; whether it pays is a matter of the whole group, however few are asked about
        now. taken: nodes in the step already. may_pause: groups in which no source has been paused in this step.
        """
        asked: list[EngineSession] = []
        for beside, group in groups.items():
            policy, count = one.policies[beside], min(len(group), one.source.max_sessions)
            if beside and one.policies[False].pauses_in(self._step):
                continue  # what does not pay alone does not pay beside others, and needs no trial there
            sessions = self._worth_reading(one, policy, drafting[beside], count, commits, cost)
            if sessions and one.source.pauses:
                was_paused = policy.paused
                if (beside in may_pause or was_paused) and not policy.pays(
                    self._step, commits, count, lambda nodes: cost(taken + nodes)
                ):
                    if not was_paused:
                        # The others may gain more without it.
                        may_pause.discard(beside)
                        for other in self._sources:
                            if other is not one and not other.policies[beside].paused:
                                other.policies[beside].judge_anew()
                    continue
                sessions = sessions[: TRIAL_SESSIONS if policy.on_trial else None]
            asked += sessions
        return asked[: one.source.max_sessions]

    def _asked(
        self, one: _Source, requests: Sequence[ProposalRequest], beside: frozenset[str]
    ) -> Mapping[str, ProposedTree]:
        """Return the trees of one source that have nodes, and learn what they took; none if it fails.

        beside: sessions for which nodes of their devices are there or expected.
        """
        begun = self._clock()
        try:
            trees = one.source.propose(requests)
            _check(trees, requests)
            tokens, reading_s = one.source.read
        except Exception:
            self._failed(one, [request.session.session_id for request in requests])
            return {}
        if self._step >= one.resumes + FAILED_PAUSE:
            one.failures = 0
        if trees:
            seconds = self._clock() - begun - reading_s + one.observing_s
            one.time.observe_drafting(len(trees), seconds)
            for session_id in trees:
                self._drafted_s[session_id in beside] += seconds / len(trees)
            for of_device in {session_id in beside for session_id in trees}:
                one.policies[of_device].observe_drafting(len(trees), seconds)
            one.observing_s = 0.0
        if tokens:
            one.time.observe_reading(tokens, reading_s)
        found = {session_id: tree for session_id, tree in trees.items() if len(tree)}
        for session_id in (request.session.session_id for request in requests):
            one.answered[session_id in beside].add(session_id in found)
            if session_id not in found:
                one.empty += 1
                if one.empty % TRIAL == 0:  # to find nothing takes little time, and a table that fills takes some steps
                    one.outcomes[session_id in beside].append((0, 0))
        return found

    def _worth_reading(
        self,
        one: _Source,
        policy: DraftPolicy,
        sessions: Sequence[EngineSession],
        count: int,
        commits: float,
        cost: CostCurve,
    ) -> list[EngineSession]:
        """Return the sessions that a source may propose for: those that it need not read much of before, those with
        least to read first; during a trial at least one. count: sessions that it would draft for."""
        source = one.source
        unread = {session.session_id: source.unread(session) for session in sessions}
        ordered = sorted(sessions, key=lambda s: unread[s.session_id])

        def pays(session: EngineSession) -> bool:
            tokens = unread[session.session_id]
            return (
                not source.pauses
                or tokens <= USUAL_TOKENS
                or policy.reading_pays(tokens, session.left, commits, count, cost)
            )

        return [session for session in ordered if pays(session)][:count] or (ordered[:1] if policy.on_trial else [])

    def _learn_outcomes(self) -> None:
        for one in self._sources:
            for beside, outcomes in one.outcomes.items():
                if outcomes:
                    nodes, gain = map(sum, zip(*outcomes, strict=True))
                    one.policies[beside].observe_step(len(outcomes), nodes, gain)
                    outcomes.clear()

    def _failed(self, one: _Source, session_ids: Sequence[str]) -> None:
        """Go on without a source, which has raised, for some steps or for good; it begins anew with its sessions."""
        pause = FAILED_PAUSE << one.failures
        one.failures, one.resumes = one.failures + 1, self._step + 1 + pause
        until = f"for {pause} steps" if one.failures < MOST_FAILURES else "until the next start"
        log.exception("the verifier's source of nodes %s fails; sessions go on without it %s", one.source.name, until)
        if one.failures == MOST_FAILURES:
            self._sources.remove(one)
        for session_id in session_ids:
            with contextlib.suppress(Exception):  # what has failed may fail again
                one.source.release(session_id)


def _sessions(plan: StepPlan, live: Mapping[str, EngineSession]) -> tuple[list[EngineSession], list[EngineSession]]:
    """Return the sessions whose known tokens the plan reads to the end, and those of them that sources serve."""
    ready = [live[a.session_id] for a in plan.allocations if a.chain == live[a.session_id].pending]
    # What a lossy rule lets the device's nodes change is the device's affair; other nodes shall change nothing.
    return ready, [s for s in ready if s.pending == 1 and s.left > 1 and s.nodes.most_together and not s.lossy]


def _check(trees: Mapping[str, ProposedTree], requests: Sequence[ProposalRequest]) -> None:
    """Raise ValueError for a node that no step can evaluate, and KeyError for a session that was not asked about."""
    vocabulary = {request.session.session_id: request.session.nodes.vocabulary for request in requests}
    for session_id, tree in trees.items():
        for node in tree:
            if not 0 <= node.token < vocabulary[session_id] or not 0 <= tree.kinds[node.id] < KINDS:
                raise ValueError(f"a node has token {node.token} and kind {tree.kinds[node.id]}")


def _step_cost(plan: StepPlan, profiler: StepProfiler) -> CostCurve:
    """Return the seconds of the planned step by its nodes."""
    filled, sessions = sum(a.chain for a in plan.allocations), len(plan.allocations)

    def cost(nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        return profiler.between_s + profiler.cost.curve(filled + nodes, sessions)

    return cost


def _floor(commits: float, cost: CostCurve, *, exploring: bool) -> float:
    """Return the least path acceptance at which nodes are proposed: near what a node's time would commit otherwise."""
    plain, more = map(float, cost(np.array([0, FURTHER_NODES])))
    price = commits / plain * (more - plain) / FURTHER_NODES if plain > 0.0 else 0.0
    floor = min(GREATEST_FLOOR, max(LEAST_FLOOR, FLOOR_SHARE * price))
    return LEAST_FLOOR if exploring else floor


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
