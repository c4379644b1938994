"""Keys and values of all sessions, one slot per token; a session's sequence is a table of slot numbers.

Accepting a path appends slot numbers to a table and gives the other slots back: no key or value is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.errors import InternalError

Slots = NDArray[np.int32]
"""Slot numbers, `[n]`."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """Tensors `[slots, kv_heads, dim]` per layer, a stack of free slots and an account of what has been promised.

    Admission goes by `reserve`: a session reserves the most that it can ever need, so `allocate` never fails for it.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.slots = slots
        self.reserved = 0
        self.keys = [torch.zeros(slots, s.kv_heads, s.key_dim, dtype=dtype, device=device) for s in layers]
        self.values = [torch.zeros(slots, s.kv_heads, s.value_dim, dtype=dtype, device=device) for s in layers]
        self._free: Slots = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._free_count = slots

    @property
    def used(self) -> int:
        """Slots that hold a token."""
        return self.slots - self._free_count

    @property
    def unreserved(self) -> int:
        """Slots that nobody has been promised."""
        return self.slots - self.reserved

    def reserve(self, count: int) -> bool:
        """Promise `count` slots; False, and nothing promised, where they are not there."""
        if count > self.unreserved:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Take a promise back."""
        self.reserved -= count

    def allocate(self, count: int) -> Slots:
        """Take `count` slots off the free stack; ascending and adjacent as far as what was freed last allows."""
        if count > self._free_count:
            raise InternalError(f"{count} KV slots were asked for, {self._free_count} are free: a reservation is short")
        top = self._free_count
        self._free_count = top - count
        return self._free[top - count : top][::-1].copy()

    def release(self, slots: Slots) -> None:
        """Give slots back; they may hold anything from now on."""
        count = len(slots)
        if self._free_count + count > self.slots:
            raise InternalError("more KV slots were given back than were taken")
        self._free[self._free_count : self._free_count + count] = slots[::-1]
        self._free_count += count


class SlotTable:
    """The slots of one sequence in order of position: a preallocated int32 array that doubles as it grows."""

    def __init__(self, capacity: int = 64) -> None:
        self._array: Slots = np.empty(max(1, capacity), dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> Slots:
        """`[len]`, a view that the next change may invalidate."""
        return self._array[: self._length]

    def extend(self, slots: Slots) -> None:
        """Append the slots of the positions that follow."""
        end = self._length + len(slots)
        if end > len(self._array):
            grown: Slots = np.empty(max(end, 2 * len(self._array)), dtype=np.int32)
            grown[: self._length] = self.slots
            self._array = grown
        self._array[self._length : end] = slots
        self._length = end

    def truncate(self, length: int) -> Slots:
        """Keep the first `length` positions and return the slots of the others."""
        dropped = self._array[length : self._length].copy()
        self._length = min(length, self._length)
        return dropped
