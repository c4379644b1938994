"""Hold the keys and values of all sessions, one slot per token; a session's sequence is a table of slot numbers.

Accepting a path appends slot numbers to a table and returns the other slots to the pool: no key or value is ever
copied. A prefix that was computed before is taken from the prefix cache in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cloud_verifier.engine.torch_backend.prefix_cache import PrefixCache, Slots
from outrider.core.errors import InternalError

__all__ = ["KVPool", "LayerShape", "Slots"]


@dataclass(frozen=True)
class LayerShape:
    """Shape of the keys and values that one attention layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """Holds tensors `[slots, kv_heads, dim]` per layer, a stack of free slots and the number of reserved slots.

    A session reserves the most slots that it can ever take beside its leased prefix, so `allocate` never fails for it:
    every slot is free, or cached without a lease, or leased, or taken by a session. The last two are at most
    `reserved`, which is at most `slots`; the first two are available to `allocate`.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.slots = slots
        self._reserved = 0  # beside leased prefixes
        self.prefixes = PrefixCache()
        self.keys = [torch.zeros(slots, s.kv_heads, s.key_dim, dtype=dtype, device=device) for s in layers]
        self.values = [torch.zeros(slots, s.kv_heads, s.value_dim, dtype=dtype, device=device) for s in layers]
        self._free: Slots = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._free_count = slots

    @property
    def used(self) -> int:
        """Return the number of slots that hold a token of a live session."""
        return self.slots - self._free_count - self.prefixes.cached

    @property
    def reserved(self) -> int:
        """Return the number of slots that live sessions hold or may take; a prefix that several share counts once."""
        return self._reserved + self.prefixes.leased

    @property
    def unreserved(self) -> int:
        """Return the number of slots that are reserved for no session."""
        return self.slots - self.reserved

    def reserve(self, count: int) -> None:
        """Reserve `count` slots, or give back `-count` reserved ones. Raises InternalError if there are fewer."""
        if count > self.unreserved:
            raise InternalError(f"{count} KV slots were admitted, {self.unreserved} are there")
        self._reserved += count

    def allocate(self, count: int) -> Slots:
        """Take `count` slots off the free stack; ascending and adjacent as far as the last releases allow.

        If there are too few, the prefix cache evicts as many as are missing. Raises InternalError if that is too few.
        """
        if count > self._free_count:
            self.release(self.prefixes.evict(count - self._free_count))
        if count > self._free_count:
            raise InternalError(f"{count} KV slots were asked for, {self._free_count} are free: a reservation is short")
        top = self._free_count
        self._free_count = top - count
        return self._free[top - count : top][::-1].copy()

    def release(self, slots: Slots | list[int]) -> None:
        """Return slots to the free stack; their keys and values may be overwritten."""
        count = len(slots)
        if self._free_count + count > self.slots:
            raise InternalError("more KV slots were released than were allocated")
        self._free[self._free_count : self._free_count + count] = slots[::-1]
        self._free_count += count
