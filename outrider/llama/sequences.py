"""Which llama.cpp sequence ids are free, and how much of the committed prefix each one holds already.

Every branch of the tree is a llama.cpp sequence, and attention sees the cells of its own sequence only, so a new
branch must first be given its whole past. Copying the prefix for each branch would cost time in proportion to the
prompt. But a committed token never changes: a sequence that is freed keeps its committed cells, and a later fork
copies only what was committed or drafted since.
"""

from __future__ import annotations

from typing import Any

from outrider.llama.library import library


class Sequences:
    """The ids 0 .. count-1 of one context with a unified KV cache."""

    def __init__(self, memory: Any, count: int) -> None:
        self._memory = memory
        self._count = count
        self._lib = library()
        self.clear()

    def clear(self) -> None:
        """Forget everything; every id is free."""
        self._lib.llama_memory_clear(self._memory, False)
        self._free = list(range(self._count - 1, -1, -1))
        self._held = [0] * self._count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """An id for the committed sequence of an empty context."""
        return self._free.pop()

    def fork(self, source: int, end: int) -> int:
        """A new branch with the past of `source` before position `end`: the exclusive end hides its later nodes."""
        branch = self._free.pop()
        self._lib.llama_memory_seq_cp(self._memory, source, branch, self._held[branch], end)
        return branch

    def release(self, sequence: int, committed: int) -> None:
        """Drop a branch above the `committed` positions that it shares with the committed sequence."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, committed, -1)
        self._held[sequence] = committed
        self._free.append(sequence)

    def truncate(self, trunk: int, length: int, branches: set[int]) -> None:
        """Drop every cell from position `length` on, and with it all branches; `trunk` stays taken."""
        self._lib.llama_memory_seq_rm(self._memory, -1, length, -1)  # -1: of any sequence, in one pass
        # A branch lives above the committed tokens, so it holds all of them, and is now cut where the trunk is.
        self._held = [min(held, length) for held in self._held]
        for branch in branches - {trunk}:
            self._held[branch] = length
            self._free.append(branch)
