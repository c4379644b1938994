"""Reads known texts: the logits after every token of them, in as few decodes as they fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from outrider.core.errors import BadRequest, InternalError
from outrider.llama.batch import Batch
from outrider.llama.context import LlamaContext, Logits, parameters
from outrider.llama.library import library
from outrider.llama.model import LlamaModel


class TextReader(LlamaContext):
    """One llama.cpp context that reads one text after another. A context manager, used on one thread."""

    def __init__(self, model: LlamaModel, *, length: int, batch: int = 64, threads: int = 1) -> None:
        """length: tokens of the longest text. batch: tokens of one decode, each with a row of logits.

        Raises BadRequest, or ModelRefused where llama.cpp makes no context.
        """
        for field, value, most in (
            ("length", length, model.n_ctx_train),
            ("batch", batch, 1 << 12),
            ("threads", threads, os.cpu_count() or 1),
        ):
            if not 1 <= value <= most:
                raise BadRequest.bound(field, value, f"between 1 and {most}")
        params = parameters(cells=length, sequences=1, batch=batch, threads=threads)
        params.n_outputs_max = batch
        params.type_k = params.type_v = library().GGML_TYPE_F16
        super().__init__(model, params)
        self.length = length
        self._memory = self._lib.llama_get_memory(self._context)
        self._rows = batch
        self._batch = Batch(batch)

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """The logits after every token of a text, as blocks `[n, V]` in order; the text before is forgotten.

        Raises BadRequest for a text that does not fit or has ids outside the vocabulary.
        """
        if not 1 <= len(tokens) <= self.length:
            raise BadRequest.bound("tokens", f"{len(tokens)} long", f"between 1 and {self.length}")
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            raise BadRequest.bound("tokens", f"from {min(tokens)} to {max(tokens)}", f"0 to {self._vocab - 1}")
        self._lib.llama_memory_clear(self._memory, False)
        for first in range(0, len(tokens), self._rows):
            part = tokens[first : first + self._rows]
            places = range(first, first + len(part))
            code = self._lib.llama_decode(self._context, self._batch.nodes(part, places, [0] * len(part)))
            if code != 0:
                raise InternalError(f"llama_decode returned {code} for a checked batch")
            yield self._logits(len(part))
