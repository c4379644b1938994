"""Extend many sequences side by side, all in one decode, as a server does that drafts for its sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.errors import BadRequest, InternalError
from outrider.llama.context import MAX_SEQUENCES, LlamaContext, Logits, check_range
from outrider.llama.model import LlamaModel


class ChainContext(LlamaContext):
    """Sequences 0 .. count-1 of one llama.cpp context, each with a cache of `length` tokens, used on one thread."""

    def __init__(self, model: LlamaModel, *, length: int, count: int, batch: int = 512, threads: int = 1) -> None:
        """batch: tokens of one decode. Raises BadRequest, or ModelRefused if llama.cpp makes no context."""
        check_range("length", length, 1, model.n_ctx_train)
        check_range("count", count, 1, MAX_SEQUENCES)
        check_range("batch", batch, 1, 1 << 16)
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

    @property
    def count(self) -> int:
        return len(self._lengths)

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
