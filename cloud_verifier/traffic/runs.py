"""What sessions produced since it was last written, a step at a time, put together to passages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import Passage, join
from cloud_verifier.traffic.redaction import Redact, hidden_in

log = logging.getLogger(__name__)

HELD = 32
"""Tokens at the end of a text that goes on which wait for what follows, where there is a hook: it must see whole what
it is to find, and not the halves of it in two passages. As many before the part of a prompt that is kept are shown to
it."""
QUIET_S = 60.0
"""After so long without a new token a text is taken to have ended."""
_NOTHING_HIDDEN: NDArray[np.bool_] = np.zeros(0, dtype=bool)


@dataclass
class Counts:
    """Tokens that recorded sessions produced, by what became of them."""

    recorded: int = 0
    redacted: int = 0
    refused: int = 0
    """Of passages on which the redaction hook failed; they are not recorded."""
    dropped: int = 0
    """Since the disk, or the store, or this process did not keep up."""


@dataclass
class _Run:
    """A text that goes on."""

    pieces: list[Passage] = field(default_factory=list)
    hidden: NDArray[np.bool_] = field(default_factory=lambda: _NOTHING_HIDDEN)
    """Of what was held, those tokens that the hook has found already."""


class Runs:
    """Of all sessions."""

    def __init__(self, redact: Redact | None, counts: Counts, prompt_tokens: int = 0) -> None:
        """prompt_tokens: of a prompt that may be kept, the last so many are."""
        self._redact = redact
        self._prompt_tokens = prompt_tokens
        self._counts = counts
        self._runs: dict[str, _Run] = {}
        """By session id."""
        self._ended: list[_Run] = []
        self.tokens = 0
        """That have come since the last cut."""

    def add(self, piece: Passage) -> None:
        """What one session produced in one step."""
        run = self._runs.get(piece.session_id)
        if run is not None and run.pieces and not run.pieces[-1].goes_on_in(piece):
            self._ended.append(run)
            run = None
        if run is None:
            run = self._runs[piece.session_id] = _Run()
        run.pieces.append(piece)
        self.tokens += len(piece)

    def cut(self, now: float, final: bool = False) -> Iterator[Passage]:
        """All that is to be written. now: seconds since 1970. final: nothing more will come."""
        ended, self._ended = self._ended, []
        for run in ended:
            yield from self._cut(run, 0)
        for session_id, run in list(self._runs.items()):
            goes_on = not final and now < run.pieces[-1].time_unix + QUIET_S
            yield from self._cut(run, HELD if goes_on and self._redact is not None else 0)
            if not run.pieces:
                del self._runs[session_id]
        self.tokens = 0

    def _cut(self, run: _Run, hold: int) -> Iterator[Passage]:
        text = join(run.pieces)
        run.pieces = []
        hidden = self._hidden(text)
        if hidden is None:
            self._counts.refused += len(text)
            run.hidden = _NOTHING_HIDDEN
            return
        text, hidden = replace(text, prompt=self._kept(text.prompt, hidden)), hidden[len(text.prompt) :]
        hidden[: len(run.hidden)] |= run.hidden
        end = max(0, len(text) - hold)
        if end < len(text):
            run.pieces, run.hidden = [text.cut(end, len(text))], hidden[end:]
        self._counts.redacted += int(hidden[:end].sum())
        yield from text.cut(0, end).without(hidden[:end])

    def _kept(self, prompt: NDArray[np.int32], hidden: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Its last tokens, behind all that is hidden in it: what is read before a text must reach up to it."""
        found = np.flatnonzero(hidden[: len(prompt)])
        begin = int(found[-1]) + 1 if len(found) else 0
        return prompt[max(begin, len(prompt) - self._prompt_tokens) :]

    def _hidden(self, text: Passage) -> NDArray[np.bool_] | None:
        """Of its prompt and its tokens, `[p + n]`. None where the hook fails: then nothing is known of the text, and it
        is not recorded."""
        if self._redact is None:
            return np.zeros(len(text.prompt) + len(text), dtype=bool)
        try:
            return hidden_in(text, self._redact).copy()
        except Exception as error:
            log.warning("%d tokens are not recorded: the redaction hook failed: %r", len(text), error)
            return None
