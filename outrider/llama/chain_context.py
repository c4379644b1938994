"""Many sequences side by side, each growing at its end, all in one decode: how a server drafts for its sessions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.core.errors import BadRequest, InternalError
from outrider.llama.batch import Batch
from outrider.llama.context import MAX_SEQUENCES, LlamaContext, Logits, parameters
from outrider.llama.model import LlamaModel


class _Place(NamedTuple):
    """One token of a decode."""

    token: int
    position: int
    sequence: int
    wanted: bool
    """Whether its logits are."""


class ChainContext(LlamaContext):
    """Sequences 0 .. count-1 of one llama.cpp context, with a cache of `length` tokens each. A context manager.

    Used on one thread. llama.cpp aborts the process on bad ids, positions and counts, so all are checked here first.
    """

    def __init__(self, model: LlamaModel, *, length: int, count: int, batch: int = 512, threads: int = 1) -> None:
        """batch: tokens of one decode. Raises BadRequest, or ModelRefused where llama.cpp makes no context."""
        for field, value, most in (
            ("length", length, model.n_ctx_train),
            ("count", count, MAX_SEQUENCES),
            ("batch", batch, 1 << 16),
            ("threads", threads, os.cpu_count() or 1),
        ):
            if not 1 <= value <= most:
                raise BadRequest.bound(field, value, f"between 1 and {most}")
        self._chunk = max(batch, count)
        self._lengths = [0] * count
        self.length = length
        params = parameters(cells=length * count, sequences=count, batch=self._chunk, threads=threads)
        params.kv_unified = False  # each sequence attends to its own cells and pays for no others
        super().__init__(model, params)
        self._memory = self._lib.llama_get_memory(self._context)
        self._batch = Batch(self._chunk)

    @property
    def count(self) -> int:
        return len(self._lengths)

    def held(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        if not 0 <= length <= self._lengths[sequence]:
            raise BadRequest.bound("length", length, f"between 0 and {self._lengths[sequence]}, what is held")
        if length < self._lengths[sequence]:
            self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1)
            self._lengths[sequence] = length

    def feed(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Logits:
        """Append tokens to sequences, at least one to each, in as few decodes as they fit.

        feeds: (sequence, tokens), no sequence twice. Returns the logits `[len(feeds), V]` after each one's last token.
        Raises BadRequest, before anything changes, for what does not fit or has no such id.
        """
        self._check(feeds)
        flat = [
            _Place(token, self._lengths[sequence] + i, sequence, wanted=i + 1 == len(tokens))
            for sequence, tokens in feeds
            for i, token in enumerate(tokens)
        ]
        rows = [self._decode(flat[first : first + self._chunk]) for first in range(0, len(flat), self._chunk)]
        for sequence, tokens in feeds:
            self._lengths[sequence] += len(tokens)
        return np.concatenate(rows)

    def _decode(self, places: Sequence[_Place]) -> Logits:
        """Logits `[n, V]` of those that want some."""
        tokens, positions, sequences, wanted = zip(*places, strict=True)
        code = self._lib.llama_decode(self._context, self._batch.nodes(tokens, positions, sequences, wanted))
        if code != 0:
            self._lib.llama_memory_clear(self._memory, False)  # parts of the batch may be in the cache
            self._lengths = [0] * self.count
            raise InternalError(f"llama_decode returned {code} for a checked batch; all sequences are empty now")
        count = sum(wanted)
        if count == 0:
            return np.empty((0, self._vocab), dtype=np.float32)
        return self._logits(count)

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
            if min(tokens) < 0 or max(tokens) >= self._vocab:
                raise BadRequest.bound("tokens", f"from {min(tokens)} to {max(tokens)}", f"0 to {self._vocab - 1}")
