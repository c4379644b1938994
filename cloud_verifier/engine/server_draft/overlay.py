"""Add nodes of the verifier's own sources to a step: which sources pay, for which sessions, and how many nodes each.

The trees of all sources are merged with the device's nodes of a session (nodes.py), and the allocation policy ranks all
nodes of all sessions together. So a source's node never takes a row that a device's node is worth more for, and where a
row's time is worth more than any of its nodes it gets none. What is left to decide is whether a source is asked at all,
since its drafting takes time.

Sources draft as soon as a session's last tokens are known, before it is decided whether to wait for its device. What a
near device answers meanwhile is taken in before the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cloud_verifier.engine.interface import TargetExecutor
from cloud_verifier.engine.nodes import SourceOutcome
from cloud_verifier.engine.row_allocation import AllocationPolicy
from cloud_verifier.engine.scheduler import StepPlan, node_cost
from cloud_verifier.engine.server_draft.base import ProposalRequest, ServerSource
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.step_profiler import StepProfiler
from outrider.core.verification import Verified

log = logging.getLogger(__name__)

MOST_NODES = 16
"""The most nodes that one source proposes for a session: each costs about 50 microseconds."""
SPARE_NODES = 2
"""Nodes that are proposed for each row that a session can expect: not all of them are worth one."""
LEAST_FLOOR, GREATEST_FLOOR = 0.03, 0.5
"""Bounds of the least path acceptance at which nodes are proposed. What is never proposed is never measured."""
FLOOR_SHARE = 0.7
"""Share of the least acceptance at which a node pays, to propose at."""
EXPLORE = 32
"""One step in so many asks every source, and for nodes down to LEAST_FLOOR, so that what pays by now is found out."""


class Overlay:
    """Adds nodes to every plan before its step, and learns from the verification after it. Not thread-safe."""

    def __init__(self, sources: Sequence[ServerSource], clock: Callable[[], float] = time.perf_counter) -> None:
        """Take sources with distinct names, the cheapest first. clock: measures what they take."""
        self._sources = list(sources)
        self._clock = clock
        self._last: list[tuple[EngineSession, Sequence[int]]] = []
        """Sessions that have generated in the last step, with the rows of their accepted nodes."""

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    @property
    def wants_hidden(self) -> bool:
        """Return whether a source reads hidden states of the last completed step."""
        return any(one.wants_hidden for one in self._sources)

    def draft(self, plan: StepPlan, live: Mapping[str, EngineSession], step: int, profiler: StepProfiler) -> bool:
        """Ask each source about the sessions of a planned step for which it pays, once after their last commit.

        Return whether a source was asked.
        """
        _, served = _sessions(plan, live)
        undrafted = [session for session in served if session.nodes.device_near is None]
        if not plan.node_rows or not undrafted:
            return False
        near = plan.coming.union(a.session_id for a in plan.allocations if a.nodes)
        token_s, explores = profiler.token_s, step % EXPLORE == 0
        floor = FLOOR_SHARE * profiler.min_acceptance if not explores else 0.0
        floor = min(GREATEST_FLOOR, max(LEAST_FLOOR, floor))
        each = min(MOST_NODES, 2 + math.ceil(SPARE_NODES * plan.node_rows / len(served)))
        for session in undrafted:
            session.nodes.device_near = session.session_id in near
        any_asked = False
        for one in list(self._sources):
            requests = [
                ProposalRequest(
                    session=session,
                    nodes=min(each, session.nodes.most_together),
                    floor=floor,
                    acceptance=session.nodes.acceptance_of(one.name, one.prior(session.salt)),
                    token_s=token_s,
                )
                for session in undrafted
                if explores or one.pays(session.session_id in near, token_s)
            ]
            if requests:
                any_asked = True
                self._ask(one, requests)
        return any_asked

    def extend(
        self, plan: StepPlan, live: Mapping[str, EngineSession], policy: AllocationPolicy, profiler: StepProfiler
    ) -> StepPlan:
        """Return the plan with the nodes that were drafted, all nodes allocated anew by the policy."""
        if not self._sources or not plan.node_rows:
            return plan
        ready, served = _sessions(plan, live)
        merged = [session.nodes.merge_drafts() for session in served]
        if not any(merged):
            return plan
        acceptances = [session.acceptances() for session in ready]
        counts, favoured = policy(acceptances, plan.node_rows, node_cost(len(ready), profiler.cost, profiler.between_s))
        nodes = {session.session_id: count for session, count in zip(ready, counts, strict=True)}
        allocations = tuple(replace(a, nodes=nodes.get(a.session_id, 0)) for a in plan.allocations)
        return replace(plan, allocations=allocations, favoured=tuple(ready[i].session_id for i in favoured))

    def committed(self, session: EngineSession, verified: Verified | None, price: float) -> None:
        """Take what a step has brought in a session, after its commit, and drop the session's drafts.

        verified: None while a prompt is read. price: tokens that the time of one more node would commit otherwise.
        """
        nodes = session.nodes
        if verified is not None and self._sources:
            self._last.append((session, verified.rows))
            for one in self._sources:
                # What finds nothing takes little time, and n-grams find little at first.
                if nodes.drafts.get(one.name):
                    outcome = nodes.own.get(one.name, SourceOutcome())
                    one.gains[bool(nodes.device_near)].add(outcome.gain - price * outcome.added)
        nodes.end_step()

    def observe(self, executor: TargetExecutor) -> None:
        """Let the sources learn from the rows of the last completed step, before the next one is completed."""
        last, self._last = self._last, []
        for one in [one for one in self._sources if one.wants_hidden]:
            try:
                for session, accepted in last:
                    if (states := executor.hidden_states(session)) is not None:
                        one.observe(session, states[[0, *accepted]])
            except Exception:
                self._failed(one)

    def release(self, session_id: str) -> None:
        """Forget a session that has ended, and do not observe its last step."""
        self._last = [one for one in self._last if one[0].session_id != session_id]
        for one in list(self._sources):
            try:
                one.release(session_id)
            except Exception:
                self._failed(one)

    def _ask(self, one: ServerSource, requests: Sequence[ProposalRequest]) -> None:
        """Have a source draft for sessions, and learn what that took; one that fails drafts nothing more."""
        begun = self._clock()
        try:
            trees = one.propose(requests)
        except Exception:
            self._failed(one)
            return
        seconds = self._clock() - begun - one.read_s
        drafted = [request.session for request in requests if request.session.session_id in trees]
        for session in drafted:
            session.nodes.drafts[one.name] = trees[session.session_id]
        if drafted:
            one.seconds.add(seconds / len(drafted))

    def _failed(self, one: ServerSource) -> None:
        """Go on without a source, which has raised."""
        log.exception("the verifier's source of nodes %s fails; sessions go on without it", one.name)
        self._sources.remove(one)


def _sessions(plan: StepPlan, live: Mapping[str, EngineSession]) -> tuple[list[EngineSession], list[EngineSession]]:
    """Return the sessions whose known tokens the plan reads to the end, and those of them that sources serve."""
    ready = [live[a.session_id] for a in plan.allocations if a.chain == live[a.session_id].pending]
    # What a lossy rule lets the device's nodes change is the device's affair; other nodes shall change nothing.
    served = (s for s in ready if not s.lossy and not s.protocol.attach.undrafted)
    return ready, [s for s in served if s.pending == 1 and s.left > 1 and s.nodes.most_together]
