"""Who steps now, as pure functions: candidates and the time in, a plan or the moment to ask again out.

One budget of rows per step covers prefill chunks, plain steps and trees. A session without nodes waits for some at most
its directive's patience after its last commit, and only where an answer can be there by then; while any other session
steps it steps along, since sitting out would save only its own row.

Nobody starves. Prompts get at least `min(prefill_rows, max(1, rows // 4))` rows of every step, who generates at
least one. Who generates comes in turn, whoever waited longest first; prompts come in order of arrival, since a prompt
that is through early is worth more than several halves, but one that had nothing in OVERDUE steps comes first. So every
step that leaves a session out either makes it overdue or serves one that has waited longer and then stands behind it:
with at most `n` sessions at once, no more than `most_skipped(n)` steps in a row leave one out.

Rows for nodes are shared evenly among those that can use them. A row that cannot be shared goes to the candidate that
comes first, and the caller then moves that one behind all others (`Plan.behind`). So over any span of steps in each of
which a session has rows and could use more nodes than it is granted, no other is granted over one node more than it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.core.errors import BadRequest

OVERDUE = 16
"""Steps without a row after which a prompt comes before those that arrived earlier."""


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
    nodes: int
    """Live nodes in its tree."""
    may_step: bool
    """False where its device has fallen too far behind (rule 16)."""
    idle: bool
    """Its device has said that nothing more will come before the next commit."""
    nodes_per_step: int
    """k of its directive, 0 where it shall not speculate."""
    patience_s: float
    rtt_s: float
    """Round trip to its device; 0 where it is not known."""
    last_commit: float
    """Time of its last commit."""
    skipped: int
    """Steps that others have made since it last had rows, or since it came."""

    @property
    def due(self) -> float:
        """When it has to step at the latest (rule 17); the past where nothing is worth waiting for."""
        nothing_comes = self.idle or self.nodes_per_step == 0 or self.rtt_s > self.patience_s
        if self.pending > 1 or self.nodes or nothing_comes:
            return float("-inf")
        return self.last_commit + self.patience_s


@dataclass(frozen=True)
class Grant:
    """One session's rows in a step."""

    session_id: str
    chain: int
    """Known tokens to put into the pool; the last known one's row gives the next token."""
    nodes: int
    """At most so many nodes of the tree besides."""


@dataclass(frozen=True)
class Plan:
    """Step now, with these."""

    grants: tuple[Grant, ...]
    behind: tuple[str, ...] = ()
    """Sessions that got a row that could not be shared evenly, in this order to be moved behind all others."""


@dataclass(frozen=True)
class Wait:
    """Nothing is due before `until`; None where no session can step at all."""

    until: float | None


def most_skipped(sessions: int) -> int:
    """How many steps in a row can leave out a session that could step, where at most so many live at once."""
    return OVERDUE + sessions - 1


def schedule(candidates: Sequence[Candidate], now: float, budget: StepBudget) -> Plan | Wait:
    """Decide on the next step. candidates: in the order in which odd rows and prompts are served."""
    able = [candidate for candidate in candidates if candidate.may_step]
    if not able:
        return Wait(None)
    due = min(candidate.due for candidate in able)
    return Wait(due) if due > now else _share(able, budget)


def _share(able: Sequence[Candidate], budget: StepBudget) -> Plan:
    """Every session that generates gets its plain row; then prompts; trees share what is left."""
    generating = sorted((c for c in able if c.pending == 1), key=lambda c: -c.skipped)
    prefilling = sorted((c for c in able if c.pending > 1), key=lambda c: -c.skipped if c.skipped >= OVERDUE else 0)
    kept = min(budget.prefill_rows, max(1, budget.rows // 4)) if prefilling else 0
    chains = dict.fromkeys((c.session_id for c in generating[: budget.rows - kept]), 1)
    left = budget.rows - len(chains)

    allowance = min(left, budget.prefill_rows) if generating else left
    for candidate in prefilling:
        rows = min(candidate.pending, allowance)
        if rows:
            chains[candidate.session_id] = rows
        allowance -= rows
        left -= rows

    # Nodes stand below the last known token, so a prompt that is not through has no use for them yet.
    speculating = [c for c in able if chains.get(c.session_id) == c.pending]
    wants = {c.session_id: min(c.nodes, c.nodes_per_step) for c in speculating}
    level = _level(wants.values(), left)
    nodes = {session_id: min(want, level) for session_id, want in wants.items()}
    odd_rows = left - sum(nodes.values())
    behind = [session_id for session_id, want in wants.items() if want > level][:odd_rows]
    for session_id in behind:
        nodes[session_id] += 1
    grants = (Grant(session_id, chain, nodes.get(session_id, 0)) for session_id, chain in chains.items())
    return Plan(tuple(grants), tuple(behind))


def _level(wants: Collection[int], rows: int) -> int:
    """The greatest level at which all fit into `rows` if everyone gets what it wants up to this level."""
    sharing = len(wants)
    for want in sorted(wants):
        if want > rows // sharing:
            return rows // sharing
        rows -= want
        sharing -= 1
    return max(wants, default=0)
