"""What sessions produced since it was last written, a step at a time, put together to passages.

A hook is shown a session's text as one, by position, whatever drafts its device used and however often its stream began
anew; only what it has left is parted by draft again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import Passage, join
from cloud_verifier.traffic.redaction import NoMask, Redact, hidden_in

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
    """Found by the hook, or so near to a gap that it may not have been."""
    refused: int = 0
    """Of passages on which the redaction hook failed; they are not recorded."""
    dropped: int = 0
    """Since the disk, or the store, or this process did not keep up."""


@dataclass
class _Run:
    """A text that goes on."""

    clear_from: int = 0
    """Position before which nothing may be written, since the hook has not seen what stood right before."""
    pieces: list[Passage] = field(default_factory=list)
    """Each goes on where the one before it ended."""
    hidden: NDArray[np.bool_] = field(default_factory=lambda: _NOTHING_HIDDEN)
    """Of what was held, those tokens that the hook has found already."""
    end: int = 0
    """Position after its last token."""
    time_unix: float = 0.0
    """Of its last token."""

    def add(self, piece: Passage) -> None:
        self.pieces.append(piece)
        self.end, self.time_unix = piece.end, piece.time_unix


class Runs:
    """Of all sessions."""

    def __init__(self, redact: Redact | None, counts: Counts, prompt_tokens: int = 0) -> None:
        """prompt_tokens: of a prompt that may be kept, the last so many are."""
        self._redact = redact
        self._prompt_tokens = prompt_tokens
        self._counts = counts
        self._runs: dict[str, _Run] = {}
        """By session id."""
        self._torn: list[_Run] = []
        """What followed their last tokens is not known."""
        self.tokens = 0
        """That have come since the last cut."""

    def add(self, piece: Passage) -> None:
        """What one session produced in one step."""
        run = self._runs.get(piece.session_id)
        if run is None:
            run = self._runs[piece.session_id] = _Run()
        elif run.end != piece.start:
            self._torn.append(run)
            run = self._runs[piece.session_id] = _Run(clear_from=piece.start + HELD)
        run.add(piece)
        self.tokens += len(piece)

    def cut(self, now: float, final: bool = False) -> Iterator[Passage]:
        """All that is to be written. now: seconds since 1970. final: nothing more will come."""
        torn, self._torn = self._torn, []
        for run in torn:
            yield from self._cut(run, torn=True)
        for session_id, run in list(self._runs.items()):
            goes_on = self._redact is not None and not final and now < run.time_unix + QUIET_S
            yield from self._cut(run, HELD if goes_on else 0)
            if not goes_on:
                del self._runs[session_id]
        self.tokens = 0

    def _cut(self, run: _Run, hold: int = 0, torn: bool = False) -> Iterator[Passage]:
        """hold: tokens at its end that wait."""
        pieces, run.pieces = run.pieces, []
        if not pieces:
            return
        prompt, start = pieces[0].prompt, pieces[0].start
        mask = self._mask(pieces)
        if mask is None:
            self._counts.refused += run.end - start
            run.hidden, run.clear_from = _NOTHING_HIDDEN, run.end + HELD
            return
        hidden = mask[len(prompt) :]
        hidden[: len(run.hidden)] |= run.hidden
        self._hide_edges(run, hidden, torn)
        end = max(0, len(hidden) - hold)
        pieces[0] = replace(pieces[0], prompt=self._kept(prompt, mask))
        run.pieces = [one.cut(max(0, start + end - one.start), len(one)) for one in pieces if one.end > start + end]
        run.hidden = hidden[end:]
        self._counts.redacted += int(hidden[:end].sum())
        for one in _joined(pieces, start + end):
            yield from one.without(hidden[one.start - start : one.end - start])

    def _hide_edges(self, run: _Run, hidden: NDArray[np.bool_], torn: bool) -> None:
        """At a gap, where there may be a part of what would have been hidden, had it been seen whole."""
        if self._redact is None:
            return
        hidden[: max(0, run.clear_from - run.end + len(hidden))] = True
        if torn:
            hidden[-HELD:] = True

    def _kept(self, prompt: NDArray[np.int32], hidden: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Its last tokens, behind all that is hidden in it: what is read before a text must reach up to it."""
        found = np.flatnonzero(hidden[: len(prompt)])
        begin = int(found[-1]) + 1 if len(found) else 0
        return prompt[max(begin, len(prompt) - self._prompt_tokens) :]

    def _mask(self, pieces: Sequence[Passage]) -> NDArray[np.bool_] | None:
        """Of the prompt and all tokens, `[p + n]`, which are hidden. The hook is asked about all at once: what is to be
        hidden may begin in one and end in another. None where it fails: then nothing is known of the text, and it is
        not recorded."""
        tokens = np.concatenate([pieces[0].prompt, *(one.tokens for one in pieces)])
        if self._redact is None:
            return np.zeros(len(tokens), dtype=bool)
        try:
            return hidden_in(tokens, pieces[0], self._redact)
        except Exception as error:
            # Of a hook's own error only the type: its message may repeat the text.
            why = error if isinstance(error, NoMask) else type(error).__name__
            log.warning(
                "%d tokens are not recorded: the redaction hook failed: %s", pieces[-1].end - pieces[0].start, why
            )
            return None


def _joined(pieces: Iterable[Passage], end: int) -> Iterator[Passage]:
    """As few passages as they fit into, up to a position."""
    group: list[Passage] = []
    for one in (piece.cut(0, end - piece.start) for piece in pieces if piece.start < end):
        if group and not group[-1].goes_on_in(one):
            yield join(group)
            group = []
        group.append(one)
    if group:
        yield join(group)
