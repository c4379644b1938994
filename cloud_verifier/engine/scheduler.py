"""Decide which sessions step now: candidates and the time in, a plan or the time to ask again out; pure functions.

One budget of rows per step covers prefill chunks, plain steps and trees. One rate decides: the tokens per second that
a step now is expected to commit. Nodes join while they raise it (row_allocation.py); and the step begins now unless
waiting for nodes on their way to sessions without any would bring more than WAIT_GAIN times this rate per second, and
than the rate for as long as the nodes make the step longer.
What the verifier's own nodes bring counts for the step now, and what a device's nodes bring beyond that for waiting.
So a near device is waited for, several are if most of them answer at once, and a single one among many is not. A
session is waited for at most its directive's draft wait after its last commit. Prompts are the exception: no session is
waited for while a prompt is to be read. Each prompt lengthens the steps of sessions that generate by PROMPT_SHARE on
average, in chunks of CHUNK or more, and nodes join as they would without prompts.

No session starves. Prompts get rows of every step that has time for them, generating sessions at least one. Generating
sessions take turns: the one that has waited longest comes first. Of prompts the one of which least is left comes first,
so that a question does not wait for a book, but one that had no row in OVERDUE steps comes before it. So every such
step that leaves a session out either makes it overdue or serves one that has waited longer and then comes behind it:
with at most `n` sessions at once, no more than `OVERDUE + n - 1` steps in a row leave one out.

The allocation policy decides which sessions get the rows that are left for nodes. Sessions that it favoured for their
place in the order of candidates are moved by the caller behind all others (`StepPlan.favoured`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.row_allocation import Acceptances, AllocationPolicy, CostCurve, RowAllocation
from outrider.core.step_cost import StepCost

OVERDUE = 64
"""Number of steps without a row after which a prompt comes before shorter ones."""
WAIT_GAIN = 2.0
"""Factor by which waiting must beat the rate of stepping, since nodes that come during a step are not lost."""
PROMPT_SHARE = 0.5
"""The share by which each prompt may lengthen the steps of sessions that generate, on average."""
PROMPT_BURST_S = 0.25
"""Most seconds of other sessions that prompts may take at once, saved while fewer prompts came."""
CHUNK = 32
"""Rows for prompts that a step has at least, if it has any: each chunk attends to all of the prompt before it."""


@dataclass(frozen=True)
class StepBudget:
    """The most rows of one forward pass over all sessions. In fewer than 2 rows some session would starve."""

    rows: int
    prompt_s: float = PROMPT_BURST_S
    """Seconds that the rows of prompts may take now of sessions that generate; below 0 they have taken too much."""
    scored_rows: int = sys.maxsize
    """The most rows that score prompts, whose logits take memory."""


@dataclass(slots=True)
class StepCandidate:
    """A session as the scheduler sees it. The device's times are 0 if they are not known."""

    session_id: str
    pending: int
    """Known tokens whose keys and values are not computed: 1 while generating, more in a prefill."""
    acceptances: Acceptances
    """Acceptances of the nodes that a step may take: at most its `nodes_per_step`, none without speculation."""
    may_step: bool
    """False if its device has fallen too far behind (rule 16)."""
    idle: bool
    """Whether no node is to be expected before the next commit: the device says so, or is not to speculate."""
    draft_wait_s: float
    rtt_s: float
    """Round trip to the device."""
    answers_s: float
    """Mean time from a commit to the device's next nodes."""
    gain: float
    """Tokens that a step with the device's nodes brings beyond those that one with the verifier's own alone would."""
    last_commit: float
    """Time of the last commit."""
    skipped: int
    """Steps of other sessions since this one last had rows, or since it came."""
    device_nodes: float = 0.0
    """Nodes of the device in a step with any, on average."""
    server_gain: float = 0.0
    """Tokens that the verifier's own nodes add to a step without the device's, on average."""
    scores: bool = False
    """Whether rows of its known tokens need logits, to score its prompt."""

    def expected(self, now: float) -> float | None:
        """Return when nodes are expected, or, if they are late, when the session has to step (rule 17).

        None if the session is not to be waited for.
        """
        due = self.last_commit + self.draft_wait_s
        # The distance alone decides: a device that was slow once is waited for again, which shows whether it still is.
        if self.acceptances or self.idle or self.rtt_s > self.draft_wait_s or due <= now:
            return None
        answer = self.last_commit + self.answers_s
        return answer if now < answer < due else due


@dataclass(frozen=True)
class StepPlan:
    """The rows of a step that begins now.

    favoured: sessions that got a row which another could have used as well; they move behind all others in this order.
    node_rows: the most rows of nodes. coming: sessions without nodes whose devices are waited for.
    prompt_s: what the step leaves of `StepBudget.prompt_s`.
    """

    allocations: tuple[RowAllocation, ...]
    favoured: tuple[str, ...] = ()
    node_rows: int = field(default=0, compare=False)
    coming: frozenset[str] = field(default=frozenset(), compare=False)
    prompt_s: float = field(default=PROMPT_BURST_S, compare=False)


@dataclass(frozen=True)
class Wait:
    """No step is due before `until`; None if no session can step at all. plan: of the step if it began now."""

    until: float | None
    plan: StepPlan | None = field(default=None, compare=False)


def prompt_rows(generating: int, prompts: int, budget: StepBudget, cost: StepCost) -> int:
    """Return the rows that prompts get on average, if they are long enough, while so many sessions generate."""
    chains, steps = _with_prompts(generating, budget, cost)
    most = (1.0 + PROMPT_SHARE * prompts) * steps[0]
    return max(1, int(np.searchsorted(steps, most, side="right")) - 1) if chains else budget.rows


def _with_prompts(generating: int, budget: StepBudget, cost: StepCost) -> tuple[int, NDArray[np.float64]]:
    """Return the rows of sessions that generate, and the seconds of a step with 0, 1, ... rows for prompts beside."""
    chains = min(generating, budget.rows - max(1, budget.rows // 4))
    return chains, cost.curve(chains + np.arange(budget.rows - chains + 1), generating)


def schedule(
    candidates: Sequence[StepCandidate],
    now: float,
    budget: StepBudget,
    allocation: AllocationPolicy,
    cost: StepCost,
    between_s: float = 0.0,
) -> StepPlan | Wait:
    """Decide on the next step.

    candidates: in the order in which equals are served. between_s: seconds of a step that no row costs.
    """
    able = [candidate for candidate in candidates if candidate.may_step]
    if not able:
        return Wait(None)
    coming = _coming(able, now)
    plan = _plan(able, budget, allocation, cost, between_s)
    until = _wait_until(coming, now, able, plan, cost, between_s) if coming else None
    if until is None:
        return plan
    return Wait(until, replace(plan, coming=frozenset(one.session_id for at, one in coming if at <= until)))


def _coming(able: Sequence[StepCandidate], now: float) -> list[tuple[float, StepCandidate]]:
    """Return (when nodes are expected, of whom) by time; [] while a prompt is to be read."""
    if any(c.pending > 1 for c in able):
        return []
    return sorted(((at, c) for c in able if (at := c.expected(now)) is not None), key=lambda one: one[0])


def _wait_until(
    coming: Sequence[tuple[float, StepCandidate]],
    now: float,
    able: Sequence[StepCandidate],
    plan: StepPlan,
    cost: StepCost,
    between_s: float,
) -> float | None:
    """Return until when waiting for expected nodes gains most; None if it gains too little. plan: of a step now."""
    allocations = {a.session_id: a for a in plan.allocations}
    stepping = [(c, allocations[c.session_id]) for c in able if c.session_id in allocations]
    tokens = sum(1.0 + max(sum(c.acceptances[: a.nodes]), c.server_gain) for c, a in stepping if a.chain == c.pending)
    rows = sum(a.chain + a.nodes for a in plan.allocations)
    more = np.cumsum([candidate.device_nodes for _, candidate in coming])
    step_s, *longer_s = cost.curve(rows + np.append(0.0, more), len(stepping))
    rate = tokens / (between_s + step_s)
    until, most, gained = None, 0.0, 0.0
    for (at, candidate), with_nodes_s in zip(coming, longer_s, strict=True):
        gained += candidate.gain
        net = gained - rate * (WAIT_GAIN * (at - now) + with_nodes_s - step_s)
        if net > most:
            until, most = at, net
    return until


def _plan(
    able: Sequence[StepCandidate], budget: StepBudget, allocation: AllocationPolicy, cost: StepCost, between_s: float
) -> StepPlan:
    """Give every generating session its plain row, then prompts theirs; trees share what is left."""
    chains, prompt_s = _chains(able, budget, cost)
    # Nodes are below the last known token, so a prompt that is not read to its end has no use for them yet.
    speculating = [c for c in able if chains.get(c.session_id) == c.pending]
    rows = budget.rows - sum(chains.values())
    seconds = node_cost(len(speculating), cost, between_s)
    counts, favoured = allocation([c.acceptances for c in speculating], rows, seconds)
    nodes = {c.session_id: count for c, count in zip(speculating, counts, strict=True)}
    allocations = (RowAllocation(session_id, chain, nodes.get(session_id, 0)) for session_id, chain in chains.items())
    return StepPlan(
        tuple(allocations), tuple(speculating[i].session_id for i in favoured), max(0, rows), prompt_s=prompt_s
    )


def node_cost(sessions: int, cost: StepCost, between_s: float) -> CostCurve:
    """Return the seconds of a step of sessions that generate by its nodes, as if it read no prompts."""
    return lambda nodes: between_s + cost.curve(sessions + nodes, sessions)


def _chains(able: Sequence[StepCandidate], budget: StepBudget, cost: StepCost) -> tuple[dict[str, int], float]:
    """Return the number of rows for known tokens by session, and the seconds that are left for prompts."""
    generating = sorted((c for c in able if c.pending == 1), key=lambda c: -c.skipped)
    prefilling = sorted(
        (c for c in able if c.pending > 1), key=lambda c: (-c.skipped if c.skipped >= OVERDUE else 0, c.pending)
    )
    if not prefilling:
        chains = dict.fromkeys((c.session_id for c in generating[: budget.rows]), 1)
        saved = budget.prompt_s + PROMPT_SHARE * cost.seconds(len(chains), len(generating))
        return chains, min(PROMPT_BURST_S, saved)
    beside, steps = _with_prompts(len(generating), budget, cost)
    allowance = len(steps) - 1
    if beside:
        by_time = int(np.searchsorted(steps, steps[0] + budget.prompt_s, side="right")) - 1
        allowance = min(allowance, max(CHUNK, by_time)) if budget.prompt_s > 0.0 else 0
    chains = dict.fromkeys((c.session_id for c in generating[: beside if allowance else budget.rows]), 1)
    left, scored = allowance, budget.scored_rows
    for candidate in prefilling:
        rows = min(candidate.pending, left, scored if candidate.scores else left)
        if rows:
            chains[candidate.session_id] = rows
        left -= rows
        scored -= rows if candidate.scores else 0
    if not beside:
        return chains, PROMPT_BURST_S
    earned = PROMPT_SHARE * len(prefilling) * steps[0]
    taken = steps[allowance - left] - steps[0]
    return chains, float(min(PROMPT_BURST_S, budget.prompt_s + earned) - taken)
