"""The arrays that one `llama_decode` reads, allocated once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.llama.library import library


class Batch:
    """Room for `capacity` tokens, each in one sequence; filling it allocates nothing."""

    def __init__(self, capacity: int) -> None:
        lib = library()
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._sequences = np.zeros(capacity, dtype=np.int32)
        self._ones = np.ones(capacity, dtype=np.int32)
        self._wanted = np.zeros(capacity, dtype=np.int8)
        # seq_id[i] points at token i's list of sequences: here one entry of `_sequences`.
        base, step = self._sequences.ctypes.data, self._sequences.itemsize
        self._lists = np.arange(base, base + capacity * step, step, dtype=np.uintp)
        self._struct = lib.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(lib.llama_pos)),
            n_seq_id=self._ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._lists.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def nodes(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool] | bool = True,
    ) -> Any:
        """Tokens at different places, each in its sequence; logits wanted of all, or of those that are told."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._sequences[:n] = sequences
        self._wanted[:n] = wanted
        self._struct.n_tokens = n
        return self._struct

    def run(self, tokens: Sequence[int], start: int, sequence: int, *, last_wanted: bool) -> Any:
        """Consecutive tokens of one sequence from position `start`, logits wanted of the last one or of none."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(start, start + n)
        self._sequences[:n] = sequence
        self._wanted[:n] = 0
        self._wanted[n - 1] = last_wanted
        self._struct.n_tokens = n
        return self._struct
