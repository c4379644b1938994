"""Decode with llama.cpp: the base of all contexts, one that reads known texts, and one that extends many sequences."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import BadRequest, InternalError, ModelRefused, between
from outrider.llama.library import errors_collected, library
from outrider.llama.model import LlamaModel

Logits = NDArray[np.float32]
KvType = Literal["f16", "f32"]

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ: greater ids abort the process
TEXT_ROWS = 64
"""Tokens of one decode of a known text, each with a row of logits."""


class DecodeBatch:
    """The arrays that one `llama_decode` reads, allocated once, for up to `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        lib = library()
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._sequences = np.zeros(capacity, dtype=np.int32)
        self._ones = np.ones(capacity, dtype=np.int32)
        self._outputs = np.zeros(capacity, dtype=np.int8)
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
            logits=self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | int,
        outputs: Sequence[bool] | bool = True,
    ) -> Any:
        """Return llama.cpp's struct of n tokens. outputs: whether logits are wanted, of all or of each."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._sequences[:n] = sequences
        self._outputs[:n] = outputs
        self._struct.n_tokens = n
        return self._struct


class LlamaContext:
    """A context of llama.cpp, which keeps its model in memory. Use it as a context manager.

    llama.cpp aborts the process on bad ids, positions and counts, so subclasses check all of them first.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        cells: int,
        sequences: int,
        batch: int,
        threads: int,
        outputs: int,
        unified: bool,
        kv_type: KvType = "f16",
    ) -> None:
        """Make the context. Raises ModelRefused if llama.cpp makes none, BadRequest for `threads`.

        cells: of the KV cache. batch: tokens of a decode, at most. outputs: rows of logits of a decode, at most.
        unified: whether sequences share the cells of their common past, or have cells of their own.
        """
        between("threads", threads, 1, os.cpu_count() or 1)
        lib = self._lib = library()
        params = lib.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = batch
        params.n_seq_max = sequences
        params.n_outputs_max = outputs
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        params.type_k = params.type_v = lib.GGML_TYPE_F32 if kv_type == "f32" else lib.GGML_TYPE_F16
        params.swa_full = True  # positions are taken back, so none may be forgotten
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # up to 9x slower for trees, less exact
        self._model = model
        self.vocab_size = model.vocab_size
        """The width V of a row of logits, which is the size of the vocabulary."""
        handle = model.acquire()
        with errors_collected() as errors:
            self._context: Any = lib.llama_init_from_model(handle, params)
        if not self._context:
            model.release()
            raise ModelRefused(f"no context for {model.path}: {'; '.join(errors) or 'llama.cpp gave no reason'}")
        self._memory = lib.llama_get_memory(self._context)
        self._chunk = batch
        self._batch = DecodeBatch(batch)

    def _forget(self) -> None:
        """Empty the cache."""
        self._lib.llama_memory_clear(self._memory, False)

    def _decode(self, batch: Any, rows: int) -> Logits:
        """Decode a checked batch and return a copy of its logits `[rows, V]`. Raises InternalError."""
        code = self._lib.llama_decode(self._context, batch)
        if code != 0:
            self._forget()  # parts of the batch may be in the cache
            raise InternalError(f"llama_decode returned {code} for a checked batch; the context is empty now")
        if rows == 0:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        # llama.cpp's own array lives until the next decode.
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape=(rows, self.vocab_size)).copy()

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise BadRequest.bound("tokens", wrong, f"an id between 0 and {self.vocab_size - 1}")

    def close(self) -> None:
        """Free the context. Closing twice is harmless."""
        if self._context:
            self._lib.llama_free(self._context)
            self._context = None
            self._model.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TextContext(LlamaContext):
    """One llama.cpp context that reads one text after another, used on one thread."""

    def __init__(self, model: LlamaModel, *, length: int, threads: int = 1) -> None:
        """Make the context. length: tokens of the longest text.

        Raises BadRequest, or ModelRefused if llama.cpp makes no context.
        """
        between("length", length, 1, model.n_ctx_train)
        rows = TEXT_ROWS
        super().__init__(model, cells=length, sequences=1, batch=rows, threads=threads, outputs=rows, unified=False)
        self.length = length

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Yield the logits after every token of a text, as blocks `[n, V]` in order; the last text is forgotten.

        Raises BadRequest for a text that does not fit or has ids outside the vocabulary.
        """
        if not 1 <= len(tokens) <= self.length:
            raise BadRequest.bound("tokens", f"{len(tokens)} long", f"between 1 and {self.length}")
        self._check_tokens(tokens)
        self._forget()
        for first in range(0, len(tokens), self._chunk):
            part = tokens[first : first + self._chunk]
            yield self._decode(self._batch.fill(part, range(first, first + len(part)), 0), len(part))


class ChainContext(LlamaContext):
    """A llama.cpp context that has sequences 0 .. count-1, each with a cache of `length` tokens; for one thread."""

    def __init__(self, model: LlamaModel, *, length: int, count: int, batch: int = 512, threads: int = 1) -> None:
        """Make the context. batch: tokens of one decode. Raises BadRequest, or ModelRefused if llama.cpp refuses."""
        between("length", length, 1, model.n_ctx_train)
        between("count", count, 1, MAX_SEQUENCES)
        between("batch", batch, 1, 1 << 16)
        self.count = count
        self._lengths = [0] * count
        self.length = length
        super().__init__(
            model,
            cells=length * count,
            sequences=count,
            batch=max(batch, count),
            threads=threads,
            outputs=count,
            unified=False,  # each sequence attends to its own cells and pays for no others
        )

    def held(self, sequence: int) -> int:
        """Return the number of tokens that a sequence holds."""
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence. Raises BadRequest if it holds fewer."""
        if not 0 <= length <= self._lengths[sequence]:
            raise BadRequest.bound("length", length, f"between 0 and {self._lengths[sequence]}, what is held")
        if length < self._lengths[sequence]:
            self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1)
            self._lengths[sequence] = length

    def feed(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Logits:
        """Append tokens to sequences, at least one to each, in as few decodes as possible.

        feeds: (sequence, tokens), no sequence twice. Returns the logits `[len(feeds), V]` after each one's last token.
        Raises BadRequest, before anything changes, for what does not fit or has no such id.
        """
        self._check(feeds)
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        outputs: list[bool] = []
        for sequence, new in feeds:
            tokens += new
            positions += range(self._lengths[sequence], self._lengths[sequence] + len(new))
            sequences += [sequence] * len(new)
            outputs += [False] * (len(new) - 1) + [True]
        rows = []
        for first in range(0, len(tokens), self._chunk):
            part = slice(first, first + self._chunk)
            batch = self._batch.fill(tokens[part], positions[part], sequences[part], outputs[part])
            rows.append(self._decode(batch, sum(outputs[part])))
        for sequence, new in feeds:
            self._lengths[sequence] += len(new)
        return np.concatenate(rows)

    def _forget(self) -> None:
        super()._forget()
        self._lengths = [0] * self.count

    def _check(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> None:
        if not self._context:
            raise InternalError("the ChainContext is closed")
        seen: set[int] = set()
        for sequence, tokens in feeds:
            if not 0 <= sequence < self.count or sequence in seen:
                raise BadRequest.bound("sequence", sequence, f"between 0 and {self.count - 1}, and there once")
            seen.add(sequence)
            room = self.length - self._lengths[sequence]
            if not 1 <= len(tokens) <= room:
                raise BadRequest.bound("tokens", f"{len(tokens)} long", f"between 1 and {room}, what is left")
            self._check_tokens(tokens)
