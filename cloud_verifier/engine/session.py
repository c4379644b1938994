"""One session in the engine: the protocol's state machine, its slots, its sampler and its counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cloud_verifier.engine.batch import Segment
from cloud_verifier.engine.kv_pool import KVPool, Slots, SlotTable
from cloud_verifier.engine.logprobs import logprobs_of
from cloud_verifier.engine.row_allocation import Acceptances
from cloud_verifier.engine.sampling import Sampler
from cloud_verifier.engine.scheduler import Candidate, RowAllocation
from cloud_verifier.engine.server_draft.llama_draft import DraftlessSession
from cloud_verifier.engine.session_history import Fingerprint, fingerprint
from cloud_verifier.engine.stats import MovingAverage, StepCounts
from outrider.core.acceptance.node_acceptance import NodeAcceptance
from outrider.core.counts import TokenCounts
from outrider.core.errors import InternalError
from outrider.core.protocol.messages import Append, Attach, Commit, Directive, Finish, SessionLimits, TokenLogprobs
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.telemetry import SessionTelemetry
from outrider.core.tree import TokenTree
from outrider.core.verification import TreeBatch, Verified, tree_batch_of, verify

_NO_SLOTS: Slots = np.empty(0, dtype=np.int32)
EMPTY_ANSWERS = 2
"""After so many empty answers in a row, or waits in vain, a device is taken to draft nothing, or to have moved out of
reach: its stream runs at full speed, without a wait for word from it after every step, until it sends a node again."""
HOPED = 1.0
"""Tokens that a device's nodes are taken to add to a step, before any have."""
ANSWERS_LATE = 1.5
"""Of what passes beside the round trip until a device's first nodes are there, as a rule; later they are late."""


def slots_needed(attach: Attach, limits: SessionLimits) -> int:
    """The most slots that a session can ever hold: the whole sequence and a full tree."""
    return len(attach.prompt) + attach.max_tokens + limits.nodes


class EngineSession:
    """One epoch of a session. Its table covers the sequence but for the tokens that are pending."""

    def __init__(
        self,
        session_id: str,
        protocol: VerifierSession,
        directive: Directive,
        pool: KVPool,
        *,
        salt: str,
        odds: NodeAcceptance,
        now: float,
        step: int,
        draft: str = "",
        record: bool = False,
    ) -> None:
        """odds: those of the tenant's sessions, from which this one's start; they learn along.

        draft: release that its device drafts with. record: whether what is produced goes on record.
        """
        attach = protocol.attach
        self.session_id = session_id
        self.protocol = protocol
        self.directive = directive
        self.draft = draft
        self.record = record
        self.rtt_ms = 0.0
        self._empty_answers = 0
        self._in_vain = 0
        """Waits to the end of its patience, since nodes came in time or were evaluated."""
        self.request: Fingerprint = fingerprint(attach, salt)
        self.tokens: list[int] = [*attach.prompt, *protocol.committed]
        self.table = SlotTable(len(self.tokens) + 64)
        self.reserved = 0
        self.shared = False
        """Whether its prompt is in the prefix cache."""
        self.last_commit = now
        self.began = now
        self.had_rows = False
        self.last_step = step
        """Number of the step in which it last had rows, or before which it came."""
        self._pool = pool
        self._salt = salt
        self._lease = pool.prefixes.nothing
        """On the part of the table that the prefix cache owns: its beginning."""
        self._lent = _NO_SLOTS
        """Slots of the rows of the step that runs."""
        self._sampler = Sampler(attach.sampling, attach.prompt)
        self._penalised = attach.sampling.penalised
        self._counts = TokenCounts(self.tokens if self._penalised else ())
        self._counted = StepCounts()
        self._commits: deque[tuple[float, int]] = deque()
        """(time, position after it) of those that the device may not have heard of."""
        self._answer_s = MovingAverage(0.1)
        self._draft_s = MovingAverage(0.1)
        self._per_level = MovingAverage(0.1)
        self._gain = MovingAverage(0.1)
        self._gain.add(HOPED)
        self._odds = NodeAcceptance(odds)
        self._ranked: list[tuple[float, int]] | None = None
        """(survival, id) of its nodes within the window, the best first; None after a change."""
        self._logprobs: tuple[TokenLogprobs, ...] = ()
        """Of the walk that is not committed yet, where the device asks for them."""
        self._ignored = 0
        self._outside: set[int] = set()
        """Ids of nodes in the tree that were found outside the window, so that each is counted once."""
        self._offered: tuple[TokenTree, NodeAcceptance] | None = None
        """For this step: the verifier's own tree in place of the device's, and the odds of its nodes."""
        self._own_odds: NodeAcceptance | None = None
        self._last_position = len(attach.prompt) + attach.max_tokens - 1

    @property
    def pending(self) -> int:
        """Known tokens whose keys and values are not in the pool: at least 1, since the last one's never are."""
        return len(self.tokens) - len(self.table)

    @property
    def telemetry(self) -> SessionTelemetry:
        """What the engine measured of the session; the front adds what only it knows."""
        counts, history = self._counted, self.protocol.history
        return SessionTelemetry(
            session_id=self.session_id,
            epoch=self.protocol.epoch,
            steps=counts.steps,
            committed=counts.committed,
            evaluated=counts.evaluated,
            accepted=counts.accepted,
            acceptance_history=history.outcomes(),
            draft_ms=1e3 * self._draft_s.value,
            nodes_per_level=self._per_level.value,
            draft_release=self.draft,
            positions=history.positions,
            first_accepted=history.first_accepted,
            dead=self.protocol.dead,
            ignored=self._ignored,
        )

    def append(self, message: Append, now: float) -> None:
        """Take nodes in (rules 10 to 12). Raises ProtocolViolation."""
        rtt_s = 1e-3 * self.rtt_ms
        while self._commits and (rtt_s == 0.0 or self._commits[0][0] + rtt_s <= now):
            self.protocol.unreceived = self._commits.popleft()[1]
        bare = self._counted.steps > 0 and not len(self.protocol.tree) and message.base == self.protocol.position
        self.protocol.append(message)
        if bare and rtt_s and len(self.protocol.tree) > 0:
            # The first guesses after a commit that left none: what passed beside the way there and back was drafting,
            # of all the levels that came together.
            self._in_vain = 0
            passed_s = max(0.0, now - self.last_commit - rtt_s)
            self._answer_s.add(passed_s)
            self._draft_s.add(passed_s / max(self.protocol.tree.depth(node.id) for node in self.protocol.tree))
        self._ranked = None
        if message.tokens:
            self._empty_answers = 0
        elif message.idle:
            self._empty_answers += 1

    def drafts_with(self, draft: str) -> None:
        """Its device drafts with another release from here on."""
        self.draft = draft
        self.protocol.change_draft()

    def begin(self, step: int, now: float) -> None:
        """It has rows in the step that begins."""
        self.last_step = step
        self.had_rows = True
        draft_wait_s = 1e-3 * self.directive.draft_wait_ms
        if (
            draft_wait_s
            and self.pending == 1
            and not len(self.protocol.tree)
            and now >= self.last_commit + draft_wait_s
        ):
            self._in_vain += 1

    def steer(self, directive: Directive) -> None:
        """Speculate so far from now on. Nodes that are outside a smaller window are no offence: they may have been sent
        before their device could know."""
        self.directive = directive
        self._ranked = None

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.protocol.attach.max_tokens - self.protocol.position

    def expected(self, nodes: int) -> float:
        """Tokens that so many of its nodes bring to a step."""
        return sum(chance for chance, _ in self._best(nodes)) if nodes else 0.0

    @property
    def thin(self) -> bool:
        """Whether this step takes nodes that the verifier drafted for it."""
        return self._offered is not None

    @property
    def drafts_nothing(self) -> bool:
        """Its device answers without a node, as one that has no draft."""
        return self._empty_answers >= EMPTY_ANSWERS and len(self.protocol.tree) == 0

    @property
    def state(self) -> str:
        """One of meters.STATES."""
        if not self.had_rows:
            return "queued"
        if self.pending > 1:
            return "prefill"
        return "decode" if self.protocol.may_step else "standing"

    def to_draft_for(self) -> DraftlessSession:
        """What a co-located draft needs to know."""
        protocol = self.protocol
        return DraftlessSession(
            session_id=self.session_id,
            tokens=self.tokens,
            position=protocol.position,
            left=self.left,
            sampling=protocol.attach.sampling,
            key=self._sampler.key,
            counts=self._counts,
            ends=protocol.ends,
        )

    def offer(self, tree: TokenTree, odds: NodeAcceptance) -> Acceptances:
        """Take the verifier's own tree for one step; what its nodes are worth. odds: those of all such trees."""
        if self._own_odds is None:
            self._own_odds = NodeAcceptance(odds)
        self._offered = tree, self._own_odds
        self._ranked = None
        return tuple(chance for chance, _ in self._best(len(tree)))

    @property
    def _answers_s(self) -> float:
        """How long after a commit that leaves no node its device's next ones come; 0 where nothing is known."""
        return 1e-3 * self.rtt_ms + ANSWERS_LATE * self._answer_s.value

    def candidate(self, step: int) -> Candidate:
        """What the scheduler needs to know after so many steps."""
        protocol, directive = self.protocol, self.directive
        ends_next = protocol.position + 1 >= protocol.attach.max_tokens
        k = min(directive.nodes_per_step, directive.window_nodes) if directive.window_depth else 0
        return Candidate(
            session_id=self.session_id,
            pending=self.pending,
            acceptances=tuple(chance for chance, _ in self._best(k)),
            may_step=protocol.may_step,
            idle=k == 0 or protocol.idle or ends_next or max(self._empty_answers, self._in_vain) >= EMPTY_ANSWERS,
            draft_wait_s=1e-3 * directive.draft_wait_ms,
            rtt_s=1e-3 * self.rtt_ms,
            answers_s=self._answers_s,
            gain=self._gain.value,
            last_commit=self.last_commit,
            skipped=step - self.last_step,
        )

    @property
    def _pending_tree(self) -> tuple[TokenTree, NodeAcceptance]:
        """What the next step takes nodes from."""
        return self._offered or (self.protocol.tree, self._odds)

    def _best(self, count: int) -> list[tuple[float, int]]:
        """(survival, id) of the nodes that are worth most to the verifier, ancestors first."""
        if self._ranked is None:
            tree, odds = self._pending_tree
            ranked = odds.ranked(tree)
            self._ranked = ranked if self.thin else self._within_window(tree, ranked)
        return self._ranked[:count]

    def _within_window(self, tree: TokenTree, ranked: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Of its device's nodes, the best first, those that the directive lets it have; the others are counted."""
        beyond = tree.position + self.directive.window_depth
        near = [best for best in ranked if tree[best[1]].position < beyond]
        within = near[: self.directive.window_nodes]
        if self._outside or len(within) < len(ranked):
            outside = {node for _, node in ranked} - {node for _, node in within}
            self._ignored += len(outside - self._outside)
            self._outside = {node for node in self._outside | outside if node in tree}
        return within

    @property
    def needed(self) -> int:
        """Slots to reserve: all that it can ever hold beside its lease; 0 for a sequence that is complete."""
        protocol = self.protocol
        return 0 if protocol.finish is not Finish.NONE else slots_needed(protocol.attach, protocol.limits) - self.leased

    @property
    def leased(self) -> int:
        """Tokens of its table that the prefix cache owns."""
        return len(self._lease)

    @property
    def held_alone(self) -> int:
        """Slots that become free for others when it goes: its reservation, and cached ones that nobody else holds."""
        return self.reserved + self._pool.prefixes.held_only_by(self._lease)

    def take_prefix(self) -> None:
        """Begin with the longest cached prefix; the last known token is left, since its row gives the next one."""
        self._lease = self._pool.prefixes.acquire(self._salt, self.tokens[:-1])
        self.table.extend(self._lease.slots)

    def reserve(self) -> None:
        """Have all promised that it can ever need; that it is there was found at its admission."""
        needed = self.needed
        if not self._pool.reserve(needed):
            raise InternalError(f"{needed} KV slots were admitted, {self._pool.unreserved} are there")
        self.reserved = needed

    def share(self) -> None:
        """Hand the table, all of which is computed and on the sequence's path, over to the prefix cache.

        Where another session was faster its slots stand in for ours. What passes to the cache leaves the reservation:
        no more is promised than before.
        """
        tokens = self.tokens[: len(self.table)]
        before = self.leased
        self._lease, doubles = self._pool.prefixes.publish(self._lease, self._salt, tokens, self.table.slots)
        self.table.truncate(0)
        self.table.extend(self._lease.slots)
        self._pool.release(doubles)
        self._pool.unreserve(self.leased - before)
        self.reserved -= self.leased - before
        self.shared = True

    def segment(self, grant: RowAllocation) -> tuple[Segment, TreeBatch | None]:
        """The rows of a grant, with slots of their own, and what the walk will see; None while the prompt goes on."""
        start = len(self.table)
        chain = self.tokens[start : start + grant.chain]
        batch = None
        if grant.chain == self.pending:
            batch = tree_batch_of(self._pending_tree[0], {node for _, node in self._best(grant.nodes)})
        nodes, depths, parents = (batch.tokens, batch.depths, batch.parents) if batch else ((), (), ())
        last = start + len(chain) - 1
        positions = np.concatenate([np.arange(start, last + 1), last + np.asarray(depths, dtype=np.int64)])
        self._lent = self._pool.allocate(len(chain) + len(nodes))
        segment = Segment(
            tokens=np.asarray([*chain, *nodes], dtype=np.int64),
            chain=len(chain),
            parents=np.asarray(parents, dtype=np.int64) + (len(chain) - 1),
            # No walk reaches a node beyond the maximum, and the model may have no such position.
            positions=np.minimum(positions, self._last_position),
            prefix=self.table.slots,
            slots=self._lent,
            wants_logits=batch is not None,
        )
        return segment, batch

    def verify(self, batch: TreeBatch, logits: torch.Tensor) -> Verified:
        """The target's path through the batch. logits: `[1 + nodes, V]`, of which only visited rows are looked at."""

        def target_token(row: int, path: Sequence[int]) -> int:
            return self._sampler.choose(logits[row], batch.position + len(path), self._counts, path)

        verified = verify(batch, target_token, self.protocol.ends)
        top = self.protocol.attach.logprobs
        if top is not None:
            rows = (0, *verified.rows)[: len(verified.tokens)]
            self._logprobs = logprobs_of(logits, rows, verified.tokens, top)
        return verified

    def keep_chain(self, segment: Segment) -> None:
        """A part of the prompt is through."""
        self.table.extend(segment.slots)
        self._lent = _NO_SLOTS

    def commit(self, segment: Segment, batch: TreeBatch, verified: Verified, now: float) -> Commit:
        """Take the walked path: its slots join the table, the others go back."""
        tree, odds = self._pending_tree
        odds.learn(tree, verified.tokens)
        commit = self.protocol.commit(batch, verified)
        own = self.thin
        if own:
            commit = replace(commit, evaluated=0)  # none of them was the device's
        if self._logprobs:
            commit, self._logprobs = replace(commit, logprobs=self._logprobs), ()
        self._ranked = self._offered = None
        rows = [*range(segment.chain), *(segment.chain - 1 + row for row in verified.rows)]
        self.table.extend(segment.slots[rows])
        self._lent = _NO_SLOTS
        if len(rows) < segment.rows:
            self._pool.release(np.delete(segment.slots, rows))
        self.tokens += verified.tokens
        if self._penalised:
            self._counts.add(verified.tokens)
        if own:
            self._counted.add(0, 0, len(verified.tokens))
        else:
            self._counted.add(len(batch.ids), len(verified.rows), len(verified.tokens))
        self.last_commit = now
        self._commits.append((now, self.protocol.position))
        if len(batch.ids) and not own:
            self._per_level.add(len(batch.ids) / max(batch.depths))
            self._gain.add(len(verified.tokens) - 1.0)
            self._in_vain = 0
        return commit

    def release(self) -> None:
        """Give back every slot, the lease and the reservation."""
        self._pool.release(self._lent)
        self._pool.release(self.table.truncate(self.leased))
        self._pool.prefixes.release(self._lease)
        self._pool.unreserve(self.reserved)
        self.table.truncate(0)
        self._lent = _NO_SLOTS
        self._lease = self._pool.prefixes.nothing
        self.reserved = 0
