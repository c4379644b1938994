"""Co-located drafting within a step: for whom, whether it pays, how many nodes each gets, and what those brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.row_allocation import Acceptances, AllocationPolicy, CostCurve
from cloud_verifier.engine.scheduler import Plan
from cloud_verifier.engine.server_draft.llama_draft import EACH, LlamaServerDraft
from cloud_verifier.engine.server_draft.policy import Payoff
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.step_profiler import StepProfiler
from outrider.core.acceptance.node_acceptance import NodeAcceptance


class ServerDraft:
    """Sees every plan before its step, and what the walks made of its nodes after."""

    def __init__(self, draft: LlamaServerDraft) -> None:
        self.evaluated = self.accepted = 0
        """Nodes of this draft's."""
        self._draft: LlamaServerDraft | None = draft
        self._odds = NodeAcceptance()
        self._payoff = Payoff()
        self._outcomes: list[tuple[int, int]] = []
        """(nodes evaluated, accepted) of the sessions that the last step drafted for."""

    def fill(
        self,
        plan: Plan,
        live: Mapping[str, EngineSession],
        step: int,
        allocation: AllocationPolicy,
        rows: int,
        ledger: StepProfiler,
    ) -> Plan:
        """Return the plan with nodes for sessions whose devices draft nothing, allocated by the policy.

        rows: the most that a step may have.
        """
        self._settle()
        able = [grant for grant in plan.grants if grant.chain == live[grant.session_id].pending]
        filled = sum(grant.chain + grant.nodes for grant in plan.grants)
        beside = sum(live[grant.session_id].expected(grant.nodes) for grant in able)

        def cost(nodes: NDArray[np.int64]) -> NDArray[np.float64]:
            return ledger.between_s + ledger.cost.curve(filled + nodes, len(plan.grants))

        thin = self._thin([live[grant.session_id] for grant in able if grant.chain == 1], len(able) + beside, cost)
        if self._draft is None or not thin or filled >= rows:
            return plan
        drafted_for = min(len(thin), self._draft.seats)
        if self._draft.pauses and not self._payoff.pays(step, len(able) + beside, drafted_for, cost):
            return plan
        drafted = self._propose(self._draft, thin)
        counts, favoured = allocation(
            [drafted.get(grant.session_id, ()) for grant in able], rows - filled, cost, beside
        )
        nodes = {g.session_id: n for g, n in zip(able, counts, strict=True) if g.session_id in drafted}
        grants = tuple(replace(grant, nodes=nodes.get(grant.session_id, grant.nodes)) for grant in plan.grants)
        return Plan(grants, (*plan.behind, *(able[i].session_id for i in favoured)))

    def _thin(self, sessions: Sequence[EngineSession], commits: float, cost: CostCurve) -> list[EngineSession]:
        """Those to draft for: their devices do not, and reading them is worth it. For a trial there is always one."""
        draft = self._draft
        if draft is None:
            return []
        unread = {
            session.session_id: draft.unread(session.session_id, len(session.tokens))
            for session in sessions
            if session.drafts_nothing
        }
        thin = sorted((s for s in sessions if s.session_id in unread), key=lambda s: unread[s.session_id])
        drafted_for = min(len(thin), draft.seats)

        def worth(session: EngineSession) -> bool:
            tokens = unread[session.session_id]
            return (
                not draft.pauses
                or tokens <= EACH
                or self._payoff.worth_reading(tokens, session.left, commits, drafted_for, cost)
            )

        return [session for session in thin if worth(session)] or (thin[:1] if self._payoff.on_trial else [])

    def learn(self, evaluated: int, accepted: int) -> None:
        """What became of the nodes of one session that was drafted for."""
        self.evaluated += evaluated
        self.accepted += accepted
        self._outcomes.append((evaluated, accepted))

    def release(self, session_id: str) -> None:
        """The session has ended."""
        if self._draft is not None:
            self._draft.release(session_id)

    def give_up(self) -> None:
        """The draft is broken."""
        self._draft = None

    def _propose(self, draft: LlamaServerDraft, thin: Sequence[EngineSession]) -> dict[str, Acceptances]:
        """What the trees of those that could be drafted for are worth, by session id."""
        trees = draft.propose([session.to_draft_for() for session in thin])
        if trees:
            self._payoff.took(len(trees), draft.effort.drafting_s)
        if draft.effort.read:
            self._payoff.read(draft.effort.read, draft.effort.reading_s)
        return {s.session_id: s.offer(trees[s.session_id], self._odds) for s in thin if s.session_id in trees}

    def _settle(self) -> None:
        """Tell the payoff what the last step brought."""
        if self._outcomes:
            evaluated, accepted = map(sum, zip(*self._outcomes, strict=True))
            self._payoff.brought(len(self._outcomes), evaluated, accepted)
            self._outcomes = []
