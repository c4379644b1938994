"""Add nodes of the server draft to a step: for which sessions, if it pays, how many each, and what they gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.row_allocation import Acceptances, AllocationPolicy, CostCurve
from cloud_verifier.engine.scheduler import StepPlan
from cloud_verifier.engine.server_draft.llama_draft import USUAL_TOKENS, LlamaServerDraft
from cloud_verifier.engine.server_draft.policy import DraftPolicy
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.step_profiler import StepProfiler
from outrider.core.acceptance.node_acceptance import NodeAcceptance


class ServerDraft:
    """Adds drafted nodes to every plan before its step, and learns from the verification after it."""

    def __init__(self, draft: LlamaServerDraft) -> None:
        self._draft = draft
        self._acceptance = NodeAcceptance()
        self._policy = DraftPolicy()
        self._outcomes: list[tuple[int, int]] = []
        """(nodes evaluated, accepted) of each session that the last step drafted for."""

    def extend(
        self,
        plan: StepPlan,
        live: Mapping[str, EngineSession],
        step: int,
        policy: AllocationPolicy,
        rows: int,
        profiler: StepProfiler,
    ) -> StepPlan:
        """Return the plan with nodes for sessions whose devices draft nothing, allocated by the policy.

        rows: the most that a step may have.
        """
        self._learn_last_step()
        able = [a for a in plan.allocations if a.chain == live[a.session_id].pending]
        filled = sum(a.chain + a.nodes for a in plan.allocations)
        beside = sum(live[a.session_id].expected(a.nodes) for a in able)

        def cost(nodes: NDArray[np.int64]) -> NDArray[np.float64]:
            return profiler.between_s + profiler.cost.curve(filled + nodes, len(plan.allocations))

        generating = [live[a.session_id] for a in able if a.chain == 1]
        draftless = self._to_draft_for(generating, len(able) + beside, cost)
        if not draftless or filled >= rows:
            return plan
        drafted_for = min(len(draftless), self._draft.max_sessions)
        if self._draft.pauses and not self._policy.pays(step, len(able) + beside, drafted_for, cost):
            return plan
        drafted = self._propose(draftless)
        counts, favoured = policy([drafted.get(a.session_id, ()) for a in able], rows - filled, cost, beside)
        nodes = {a.session_id: count for a, count in zip(able, counts, strict=True) if a.session_id in drafted}
        allocations = tuple(replace(a, nodes=nodes.get(a.session_id, a.nodes)) for a in plan.allocations)
        return StepPlan(allocations, (*plan.favoured, *(able[i].session_id for i in favoured)))

    def _to_draft_for(self, sessions: Sequence[EngineSession], commits: float, cost: CostCurve) -> list[EngineSession]:
        """Return the sessions whose devices draft nothing and whose reading pays; during a trial at least one."""
        draft = self._draft
        unread = {
            session.session_id: draft.unread(session.session_id, len(session.tokens))
            for session in sessions
            if session.drafts_nothing
        }
        draftless = sorted((s for s in sessions if s.session_id in unread), key=lambda s: unread[s.session_id])
        drafted_for = min(len(draftless), draft.max_sessions)

        def pays(session: EngineSession) -> bool:
            tokens = unread[session.session_id]
            return (
                not draft.pauses
                or tokens <= USUAL_TOKENS
                or self._policy.reading_pays(tokens, session.left, commits, drafted_for, cost)
            )

        return [session for session in draftless if pays(session)] or (draftless[:1] if self._policy.on_trial else [])

    def learn(self, evaluated: int, accepted: int) -> None:
        """Learn from the nodes of one session that was drafted for."""
        self._outcomes.append((evaluated, accepted))

    def release(self, session_id: str) -> None:
        """Forget a session that has ended."""
        self._draft.release(session_id)

    def _propose(self, draftless: Sequence[EngineSession]) -> dict[str, Acceptances]:
        """Draft trees and return their nodes' acceptance by session id, for sessions that could be drafted for."""
        draft = self._draft
        trees = draft.propose(draftless)
        if trees:
            self._policy.observe_drafting(len(trees), draft.drafting_s)
        if draft.read_tokens:
            self._policy.observe_reading(draft.read_tokens, draft.reading_s)
        return {
            session.session_id: session.offer(trees[session.session_id], self._acceptance)
            for session in draftless
            if session.session_id in trees
        }

    def _learn_last_step(self) -> None:
        if self._outcomes:
            evaluated, accepted = map(sum, zip(*self._outcomes, strict=True))
            self._policy.observe_step(len(self._outcomes), evaluated, accepted)
            self._outcomes = []
