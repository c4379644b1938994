"""Who steps now, as pure functions: candidates and the time in, a plan or the moment to ask again out.

One budget of rows per step covers prefill chunks, plain steps and trees. One rate decides all: the tokens per second
that a step now is expected to commit. Nodes join while they raise it (row_allocation.py); and the step begins now
unless nodes on their way to sessions without any would bring more than WAIT_GAIN times this rate per second of
waiting. A near device is waited for, several are where most of them answer at once, and nobody is for one among many.
A session is waited for at most its directive's draft wait after its last commit. The exception are prompts, for whose
first token somebody waits: nobody else is waited for while one is to be read, and nodes lengthen a step that leaves one
unread by PROMPT_DELAY at most, whatever they would bring.

Nobody starves. Prompts get at least `min(prefill_rows, max(1, rows // 4))` rows of every step, who generates at
least one. Who generates comes in turn, whoever waited longest first; prompts come in order of arrival, since a prompt
that is through early is worth more than several halves, but one that had nothing in OVERDUE steps comes first. So every
step that leaves a session out either makes it overdue or serves one that has waited longer and then stands behind it:
with at most `n` sessions at once, no more than `most_skipped(n)` steps in a row leave one out.

The allocation policy says which sessions get the rows that are left for nodes (row_allocation.py). Where the order of
the candidates decided, the caller then moves the favoured sessions behind all others (`Plan.behind`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloud_verifier.engine.row_allocation import Acceptances, AllocationPolicy
from outrider.core.errors import BadRequest
from outrider.core.step_cost import StepCost

OVERDUE = 16
"""Steps without a row after which a prompt comes before those that arrived earlier."""
WAIT_GAIN = 2.0
"""What comes during a step is not lost, so that waiting while it gains only as much as stepping waits too long."""
PROMPT_DELAY = 0.02
"""By which share nodes may make a step longer that leaves a prompt unread."""


@dataclass(frozen=True)
class StepBudget:
    """How much one forward pass may hold."""

    rows: int
    """Over all sessions."""
    prefill_rows: int
    """Of them for prompts while anybody generates, so that a long prompt does not hold the others up."""

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise BadRequest.bound("rows", self.rows, "at least 2: one for a prompt, one for who generates")
        if not 1 <= self.prefill_rows <= self.rows:
            raise BadRequest.bound("prefill_rows", self.prefill_rows, f"between 1 and {self.rows}, the rows")


@dataclass(frozen=True)
class Candidate:
    """What the scheduler knows of one session."""

    session_id: str
    pending: int
    """Known tokens that are not in the KV pool: 1 while generating, more in a prefill."""
    acceptances: Acceptances
    """Of the nodes that a step may take from it: k of its directive at most, and none where it shall not speculate."""
    may_step: bool
    """False where its device has fallen too far behind (rule 16)."""
    idle: bool
    """No node is to be expected before the next commit: its device has said so, or it shall not speculate."""
    draft_wait_s: float
    rtt_s: float
    """Round trip to its device; 0 where it is not known."""
    answers_s: float
    """How long after a commit its device's nodes come, as a rule; 0 where it is not known."""
    gain: float
    """Tokens that they add to a step, lately."""
    last_commit: float
    """Time of its last commit."""
    skipped: int
    """Steps that others have made since it last had rows, or since it came."""

    def expected(self, now: float) -> float | None:
        """When its nodes are expected, or, where they are late, when it has to step (rule 17). None: nobody waits."""
        due = self.last_commit + self.draft_wait_s
        # By the distance alone: a device that was slow once is waited for again, and so it shows if it still is.
        if self.acceptances or self.idle or self.rtt_s > self.draft_wait_s or due <= now:
            return None
        answer = self.last_commit + self.answers_s
        return answer if now < answer < due else due


@dataclass(frozen=True)
class RowAllocation:
    """One session's rows in a step."""

    session_id: str
    chain: int
    """Known tokens to put into the pool; the last known one's row gives the next token."""
    nodes: int
    """So many nodes of the tree besides, those that are worth most."""


@dataclass(frozen=True)
class Plan:
    """Step now, with these."""

    grants: tuple[RowAllocation, ...]
    behind: tuple[str, ...] = ()
    """Sessions that got a row which another could have used as well, in this order to be moved behind all others."""


@dataclass(frozen=True)
class Wait:
    """Nothing is due before `until`; None where no session can step at all."""

    until: float | None


def most_skipped(sessions: int) -> int:
    """How many steps in a row can leave out a session that could step, where at most so many live at once."""
    return OVERDUE + sessions - 1


def prompt_rows(generating: int, budget: StepBudget) -> int:
    """Of a step in which so many generate, the rows that prompts get, if they are long enough."""
    kept = min(budget.prefill_rows, max(1, budget.rows // 4))
    left = budget.rows - min(generating, budget.rows - kept)
    return min(left, budget.prefill_rows) if generating else left


def steps_to_read(own: int, before: Sequence[int], rows: int) -> int:
    """About how many steps with so many rows for prompts it takes to read `own` tokens behind those `before` them.

    At the latest all are read in turn. Whoever is overdue comes first, but for one step only, and stands behind again:
    it has a step's rows in every `OVERDUE + 1`, or in more where so many are overdue that they come one by one.
    """
    chunks = _steps(own, rows)
    one_by_one = chunks + sum(min(chunks, _steps(other, rows)) for other in before)
    return min(_steps(own + sum(before), rows), max((OVERDUE + 1) * chunks, one_by_one))


def _steps(tokens: int, rows: int) -> int:
    return -(-tokens // rows)


def schedule(
    candidates: Sequence[Candidate],
    now: float,
    budget: StepBudget,
    allocation: AllocationPolicy,
    cost: StepCost,
    between_s: float = 0.0,
) -> Plan | Wait:
    """Decide on the next step.

    candidates: in the order in which equals and prompts are served. between_s: what passes between two steps anyhow.
    """
    able = [candidate for candidate in candidates if candidate.may_step]
    if not able:
        return Wait(None)
    plan = _share(able, budget, allocation, cost, between_s)
    coming = _coming(able, now)
    until = _worth_waiting(coming, now, _rate(able, plan, cost, between_s)) if coming else None
    return plan if until is None else Wait(until)


def _rate(able: Sequence[Candidate], plan: Plan, cost: StepCost, between_s: float) -> float:
    """Tokens per second that the step is expected to commit."""
    grants = {grant.session_id: grant for grant in plan.grants}
    stepping = [(c, grants[c.session_id]) for c in able if c.session_id in grants]
    tokens = sum(1.0 + sum(c.acceptances[: grant.nodes]) for c, grant in stepping if grant.chain == c.pending)
    rows = sum(grant.chain + grant.nodes for _, grant in stepping)
    return tokens / (between_s + cost.seconds(rows, len(stepping)))


def _coming(able: Sequence[Candidate], now: float) -> list[tuple[float, float]]:
    """(when nodes are expected, tokens that they add), the first ones first; none while a prompt is to be read."""
    if any(c.pending > 1 for c in able):
        return []
    return sorted((at, c.gain) for c in able if (at := c.expected(now)) is not None)


def _worth_waiting(coming: Sequence[tuple[float, float]], now: float, rate: float) -> float | None:
    """Until when it gains most to wait for what is coming; None where it gains too little."""
    until, most, gained = None, 0.0, 0.0
    for at, gain in coming:
        gained += gain
        net = gained - WAIT_GAIN * rate * (at - now)
        if net > most:
            until, most = at, net
    return until


def _share(
    able: Sequence[Candidate], budget: StepBudget, allocation: AllocationPolicy, cost: StepCost, between_s: float
) -> Plan:
    """Every session that generates gets its plain row; then prompts; trees share what is left."""
    chains = _chains(able, budget)
    filled = sum(chains.values())
    # Nodes stand below the last known token, so a prompt that is not through has no use for them yet.
    speculating = [c for c in able if chains.get(c.session_id) == c.pending]
    rows = budget.rows - filled
    if any(chains.get(c.session_id, 0) < c.pending for c in able if c.pending > 1):
        steps = cost.curve(filled + np.arange(rows + 1), len(chains))
        rows = int(np.searchsorted(steps, (1.0 + PROMPT_DELAY) * steps[0], side="right")) - 1
    counts, favoured = allocation(
        [c.acceptances for c in speculating],
        rows,
        lambda nodes: between_s + cost.curve(filled + nodes, len(chains)),
        0.0,
    )
    nodes = {c.session_id: count for c, count in zip(speculating, counts, strict=True)}
    grants = (RowAllocation(session_id, chain, nodes.get(session_id, 0)) for session_id, chain in chains.items())
    return Plan(tuple(grants), tuple(speculating[i].session_id for i in favoured))


def _chains(able: Sequence[Candidate], budget: StepBudget) -> dict[str, int]:
    """Rows for known tokens, by session."""
    generating = sorted((c for c in able if c.pending == 1), key=lambda c: -c.skipped)
    prefilling = sorted((c for c in able if c.pending > 1), key=lambda c: -c.skipped if c.skipped >= OVERDUE else 0)
    allowance = prompt_rows(len(generating), budget) if prefilling else 0
    chains = dict.fromkeys((c.session_id for c in generating[: budget.rows - allowance]), 1)
    for candidate in prefilling:
        rows = min(candidate.pending, allowance)
        if rows:
            chains[candidate.session_id] = rows
        allowance -= rows
    return chains
