"""Hold the KV slots of one session's sequence, and lay out the rows that a step computes for the session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, Slots
from outrider.core.verification import TreeBatch

_NO_SLOTS: Slots = np.empty(0, dtype=np.int32)


class SessionSlots:
    """Holds the KV slots of one session: a prefix leased from the prefix cache, then slots of its own.

    reserved: slots that the pool has reserved for the session. shared: whether its prompt is in the prefix cache.
    computed: number of tokens whose keys and values are computed.
    """

    def __init__(self, pool: KVPool, tokens: Sequence[int], *, most: int, last_position: int, salt: str = "") -> None:
        """Hold no slot yet. tokens: the known tokens of the sequence, to which commits append.

        most: slots that the session can ever hold: those of the whole sequence and of a full tree. last_position: the
        greatest position that a row may have. salt: only sessions with the same one share prefixes.
        """
        self.reserved = 0
        self.shared = False
        self._pool = pool
        self._tokens = tokens
        self._table: Slots = np.empty(most, dtype=np.int32)
        self.computed = 0
        self._last_position = last_position
        self._salt = salt
        self._lease = pool.prefixes.no_lease
        self._step_slots = _NO_SLOTS
        """Slots of the rows of the current step."""

    @property
    def table(self) -> Slots:
        """Return the slots of the tokens whose keys and values are computed, in order of position: a view that the next
        change may invalidate."""
        return self._table[: self.computed]

    @property
    def leased(self) -> int:
        """Return the number of tokens at the table's beginning whose slots belong to the prefix cache."""
        return len(self._lease.slots)

    @property
    def needed(self) -> int:
        """Return the slots to reserve: all that the session can ever hold beside its lease."""
        return len(self._table) - self.leased

    @property
    def held_alone(self) -> int:
        """Return the slots that become available at its end: its reservation, and cached ones that only it holds."""
        return self.reserved + self._pool.prefixes.held_only_by(self._lease)

    def take_prefix(self, most: int) -> None:
        """Begin with the longest cached prefix, of at most so many tokens."""
        self._lease = self._pool.prefixes.acquire(self._salt, self._tokens[:most])
        self._append(self._lease.slots)

    def reserve(self) -> None:
        """Reserve all slots that are needed. Raises InternalError if the pool has fewer, which admission rules out."""
        self._pool.reserve(self.needed)
        self.reserved = self.needed

    def share(self) -> None:
        """Pass the table, all of which is computed and on the sequence's path, to the prefix cache.

        Where the cache already has a token's slot, it replaces the session's own. The reservation shrinks by what
        passes to the cache: no more is reserved than before.
        """
        before = self.leased
        tokens = self._tokens[: self.computed]
        self._lease, doubles = self._pool.prefixes.publish(self._lease, self._salt, tokens, self.table)
        self.table[:] = self._lease.slots
        self._pool.release(doubles)
        self._pool.reserve(before - self.leased)
        self.reserved -= self.leased - before
        self.shared = True

    def segment(self, chain: int, batch: TreeBatch | None) -> Segment:
        """Allocate slots for the next `chain` known tokens and the batch's nodes, and return their rows.

        batch: None if no token follows the chain: then no logits are needed for one.
        """
        start = self.computed
        tokens, last, most = [*self._tokens[start : start + chain]], start + chain - 1, self._last_position
        positions, parents = list(range(start, start + chain)), []
        if batch:
            tokens += batch.tokens
            # A node beyond the last position is never accepted, and the model may have no such position.
            positions += [min(last + depth, most) for depth in batch.depths]
            parents = [row + chain - 1 for row in batch.parents]
        self._step_slots = self._pool.allocate(len(tokens))
        return Segment(  # numpy's own functions take longer for so few numbers
            tokens=np.array(tokens, dtype=np.int64),
            chain=chain,
            parents=np.array(parents, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            prefix=self.table,
            slots=self._step_slots,
            wants_logits=batch is not None,
        )

    def keep(self, segment: Segment, accepted: Sequence[int] = ()) -> None:
        """Append the slots of the chain and of accepted nodes to the table, and release those of all other nodes.

        accepted: rows of the segment's tree batch, in order of position.
        """
        slots, chain = segment.slots, segment.chain
        self._step_slots = _NO_SLOTS
        if chain + len(accepted) == len(slots):
            self._append(slots)
            return
        each = slots.tolist()  # a list, as in `segment`
        self._append(each[:chain] + [each[chain - 1 + row] for row in accepted])
        self._pool.release([slot for row, slot in enumerate(each[chain:], start=1) if row not in accepted])

    def release(self) -> None:
        """Return every slot, the lease and the reservation."""
        self._pool.release(self._step_slots)
        self._pool.release(self.table[self.leased :])
        self._pool.prefixes.release(self._lease)
        self._pool.reserve(-self.reserved)
        self.computed = self.reserved = 0
        self._step_slots = _NO_SLOTS
        self._lease = self._pool.prefixes.no_lease

    def _append(self, slots: Slots | list[int]) -> None:
        end = self.computed + len(slots)
        self._table[self.computed : end] = slots
        self.computed = end
