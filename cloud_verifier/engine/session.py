"""One session in the engine: the protocol's state machine, its slots, its sampler and its counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cloud_verifier.engine.batch import Segment
from cloud_verifier.engine.kv_pool import KVPool, Slots, SlotTable
from cloud_verifier.engine.memory import Fingerprint, fingerprint
from cloud_verifier.engine.sampling import Sampler
from cloud_verifier.engine.scheduler import Candidate, Grant
from cloud_verifier.engine.stats import Acceptance, SessionStats
from outrider.core.counts import TokenCounts
from outrider.core.protocol.messages import Append, Attach, Commit, Directive, SessionLimits
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.walk import Batch, Walked, walk

_NO_SLOTS: Slots = np.empty(0, dtype=np.int32)
EMPTY_ANSWERS = 2
"""After so many empty answers in a row a device is taken to draft nothing: its stream runs at full speed, without a
wait for word from it after every step, until it sends a node again."""


def slots_needed(attach: Attach, limits: SessionLimits) -> int:
    """The most slots that a session can ever hold: the whole sequence and a full tree."""
    return len(attach.prompt) + attach.max_tokens + limits.nodes


class EngineSession:
    """One epoch of a session. Its table covers the sequence but for the tokens that are pending."""

    def __init__(self, session_id: str, protocol: VerifierSession, directive: Directive, now: float) -> None:
        attach = protocol.attach
        self.session_id = session_id
        self.protocol = protocol
        self.directive = directive
        self.rtt_ms = 0.0
        self._empty_answers = 0
        self.request: Fingerprint = fingerprint(attach)
        self.tokens: list[int] = [*attach.prompt, *protocol.committed]
        self.table = SlotTable(len(self.tokens) + 64)
        self.reserved = 0
        self.last_commit = now
        self.last_step = 0
        self._lent = _NO_SLOTS
        """Slots of the rows of the step that runs."""
        self._sampler = Sampler(attach.sampling, attach.prompt)
        self._penalised = attach.sampling.penalised
        self._counts = TokenCounts(self.tokens if self._penalised else ())
        self._acceptance = Acceptance()
        self._last_position = len(attach.prompt) + attach.max_tokens - 1

    @property
    def pending(self) -> int:
        """Known tokens whose keys and values are not in the pool: at least 1, since the last one's never are."""
        return len(self.tokens) - len(self.table)

    @property
    def stats(self) -> SessionStats:
        return self._acceptance.snapshot(self.protocol.dead)

    def append(self, message: Append) -> None:
        """Take nodes in (rules 10 to 12). Raises ProtocolViolation."""
        self.protocol.append(message)
        if message.tokens:
            self._empty_answers = 0
        elif message.idle:
            self._empty_answers += 1

    def candidate(self) -> Candidate:
        """What the scheduler needs to know."""
        protocol, directive = self.protocol, self.directive
        ends_next = protocol.position + 1 >= protocol.attach.max_tokens
        return Candidate(
            session_id=self.session_id,
            pending=self.pending,
            nodes=len(protocol.tree),
            may_step=protocol.may_step,
            idle=protocol.idle or ends_next or self._empty_answers >= EMPTY_ANSWERS,
            nodes_per_step=directive.nodes_per_step if directive.window_nodes else 0,
            patience_s=1e-3 * directive.patience_ms,
            rtt_s=1e-3 * self.rtt_ms,
            last_commit=self.last_commit,
            last_step=self.last_step,
        )

    def adopt(self, older: EngineSession, pool: KVPool) -> None:
        """Take over the slots of an earlier epoch as far as both sequences agree; the older one is left with none."""
        ours, theirs = np.asarray(self.tokens[:-1]), np.asarray(older.tokens[: len(older.table)])
        length = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:length] != theirs[:length])
        self.table, older.table = older.table, SlotTable()
        pool.release(self.table.truncate(int(differ[0]) if len(differ) else length))

    def segment(self, grant: Grant, pool: KVPool) -> tuple[Segment, Batch | None]:
        """The rows of a grant, with slots of their own, and what the walk will see; None while the prompt goes on."""
        start = len(self.table)
        chain = self.tokens[start : start + grant.chain]
        batch = self.protocol.batch(grant.nodes) if grant.chain == self.pending else None
        nodes, depths, parents = (batch.tokens, batch.depths, batch.parents) if batch else ((), (), ())
        last = start + len(chain) - 1
        positions = np.concatenate([np.arange(start, last + 1), last + np.asarray(depths, dtype=np.int64)])
        self._lent = pool.allocate(len(chain) + len(nodes))
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

    def walk(self, batch: Batch, logits: torch.Tensor) -> Walked:
        """The target's path through the batch. logits: `[1 + nodes, V]`, of which only visited rows are looked at."""

        def target_token(row: int, path: Sequence[int]) -> int:
            return self._sampler.choose(logits[row], batch.position + len(path), self._counts, path)

        return walk(batch, target_token, self.protocol.ends)

    def keep_chain(self, segment: Segment) -> None:
        """A part of the prompt is through."""
        self.table.extend(segment.slots)
        self._lent = _NO_SLOTS

    def commit(self, segment: Segment, batch: Batch, walked: Walked, pool: KVPool, now: float) -> Commit:
        """Take the walked path: its slots join the table, the others go back."""
        commit = self.protocol.commit(batch, walked)
        rows = [*range(segment.chain), *(segment.chain - 1 + row for row in walked.rows)]
        self.table.extend(segment.slots[rows])
        self._lent = _NO_SLOTS
        if len(rows) < segment.rows:
            pool.release(np.delete(segment.slots, rows))
        self.tokens += walked.tokens
        if self._penalised:
            self._counts.add(walked.tokens)
        self._acceptance.add(batch.depths, len(walked.rows), len(walked.tokens))
        self.last_commit = now
        return commit

    def release(self, pool: KVPool) -> None:
        """Give back every slot and the reservation."""
        pool.release(self._lent)
        pool.release(self.table.truncate(0))
        pool.unreserve(self.reserved)
        self._lent = _NO_SLOTS
        self.reserved = 0
