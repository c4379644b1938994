"""Read known texts: return the logits after every token, in as few decodes as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.core.errors import BadRequest
from outrider.llama.context import LlamaContext, Logits, check_range
from outrider.llama.model import LlamaModel


class TextReader(LlamaContext):
    """One llama.cpp context that reads one text after another, used on one thread."""

    def __init__(self, model: LlamaModel, *, length: int, batch: int = 64, threads: int = 1) -> None:
        """length: tokens of the longest text. batch: tokens of one decode, each with a row of logits.

        Raises BadRequest, or ModelRefused if llama.cpp makes no context.
        """
        check_range("length", length, 1, model.n_ctx_train)
        check_range("batch", batch, 1, 1 << 12)
        super().__init__(model, cells=length, sequences=1, batch=batch, threads=threads, outputs=batch, unified=False)
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
