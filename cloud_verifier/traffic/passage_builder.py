"""Join what sessions produced, one step at a time, into passages, without the tokens that a redaction hook finds.

A hook sees a session's text as one, by position, whatever drafts its device used and however often its stream was
opened anew; only what the hook leaves is split by draft again.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import Passage, join
from outrider.core.errors import BadRequest

log = logging.getLogger(__name__)

REDACTION_CONTEXT = 32
"""Tokens at the end of an open text that wait for what follows if there is a hook, which must see whole what it shall
find, not its halves in two passages. As many ids before the kept part of a prompt are shown to the hook."""
QUIET_S = 60.0
"""Seconds without a new token after which a text is taken to have ended."""
Redact = Callable[[NDArray[np.int32], str, str], Any]
"""The operator's hook: (tokens `[n]`, traffic class, tenant) -> mask `[n]`, true where a token must not be recorded."""
_NOTHING_HIDDEN: NDArray[np.bool_] = np.zeros(0, dtype=bool)


@dataclass
class RecordingCounts:
    """The counts of tokens that recorded sessions produced, by what became of them."""

    recorded: int = 0
    redacted: int = 0
    """Tokens that the hook found, or that stood so near to a gap that it might have."""
    refused: int = 0
    """Tokens of passages on which the redaction hook failed; they are not recorded."""
    dropped: int = 0
    """Tokens lost because the disk, the store or this process did not keep up."""


@dataclass
class _OpenText:
    """The text of one session, which may go on."""

    clear_from: int = 0
    """Position before which nothing may be written, since the hook has not seen what stood right before."""
    pieces: list[Passage] = field(default_factory=list)
    """Pieces that are not yet written; each begins where the previous one ended."""
    hidden: NDArray[np.bool_] = field(default_factory=lambda: _NOTHING_HIDDEN)
    """`[held]`: tokens at the beginning of `pieces` that the hook has found already."""
    end: int = 0
    """Position after the last token."""
    time_unix: float = 0.0
    """When the last token was produced."""


class PassageBuilder:
    """Collects the pieces of all recorded sessions, and hands them out as passages."""

    def __init__(self, redact: Redact | None, counts: RecordingCounts, prompt_tokens: int = 0) -> None:
        """Keep the last `prompt_tokens` ids of a prompt that may be kept."""
        self._redact = redact
        self._prompt_tokens = prompt_tokens
        self._counts = counts
        self._texts: dict[str, _OpenText] = {}
        """session id -> its open text"""
        self._torn: list[_OpenText] = []
        """Texts whose next tokens are missing."""
        self.tokens = 0
        """Tokens added since the last `take`."""

    def add(self, piece: Passage) -> None:
        """Add what one session produced in one step."""
        text = self._texts.get(piece.session_id)
        if text is None:
            text = self._texts[piece.session_id] = _OpenText()
        elif text.end != piece.start:
            self._torn.append(text)
            text = self._texts[piece.session_id] = _OpenText(clear_from=piece.start + REDACTION_CONTEXT)
        text.pieces.append(piece)
        text.end, text.time_unix = piece.end, piece.time_unix
        self.tokens += len(piece)

    def take(self, now: float, final: bool = False) -> Iterator[Passage]:
        """Yield the passages to be written. now: seconds since 1970. final: nothing more will come."""
        torn, self._torn = self._torn, []
        for text in torn:
            yield from self._cut(text, torn=True)
        for session_id, text in list(self._texts.items()):
            stays_open = self._redact is not None and not final and now < text.time_unix + QUIET_S
            yield from self._cut(text, REDACTION_CONTEXT if stays_open else 0)
            if not stays_open:
                del self._texts[session_id]
        self.tokens = 0

    def _cut(self, text: _OpenText, hold: int = 0, torn: bool = False) -> Iterator[Passage]:
        """Yield a text's passages, but for its last `hold` tokens, which wait. torn: its next tokens are missing."""
        pieces, text.pieces = text.pieces, []
        if not pieces:
            return
        prompt, start = pieces[0].prompt, pieces[0].start
        mask = self._mask(pieces)
        if mask is None:
            self._counts.refused += text.end - start
            text.hidden, text.clear_from = _NOTHING_HIDDEN, text.end + REDACTION_CONTEXT
            return
        hidden = mask[len(prompt) :]
        hidden[: len(text.hidden)] |= text.hidden
        self._hide_edges(text, hidden, torn)
        end = max(0, len(hidden) - hold)
        pieces[0] = replace(pieces[0], prompt=self._kept_prompt(prompt, mask))
        text.pieces = [one.cut(max(0, start + end - one.start), len(one)) for one in pieces if one.end > start + end]
        text.hidden = hidden[end:]
        self._counts.redacted += int(hidden[:end].sum())
        for one in _joined(pieces, start + end):
            yield from one.without(hidden[one.start - start : one.end - start])

    def _hide_edges(self, text: _OpenText, hidden: NDArray[np.bool_], torn: bool) -> None:
        """Hide tokens beside a gap: they may be a part of what the hook would have found, had it seen the whole."""
        if self._redact is None:
            return
        hidden[: max(0, text.clear_from - text.end + len(hidden))] = True
        if torn:
            hidden[-REDACTION_CONTEXT:] = True

    def _kept_prompt(self, prompt: NDArray[np.int32], hidden: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Return the last ids of a prompt, behind all that is hidden in it: context must reach up to the text."""
        found = np.flatnonzero(hidden[: len(prompt)])
        begin = int(found[-1]) + 1 if len(found) else 0
        return prompt[max(begin, len(prompt) - self._prompt_tokens) :]

    def _mask(self, pieces: Sequence[Passage]) -> NDArray[np.bool_] | None:
        """Return which ids of the prompt and of all pieces are hidden, `[p + n]`.

        The hook is asked about all at once, since what it shall find may begin in one piece and end in another. None
        if it fails: then nothing is known of the text, and it is not recorded.
        """
        tokens = np.concatenate([pieces[0].prompt, *(one.tokens for one in pieces)])
        if self._redact is None:
            return np.zeros(len(tokens), dtype=bool)
        try:
            mask = np.asarray(self._redact(tokens, pieces[0].traffic_class, pieces[0].tenant))
        except Exception as error:
            failure = type(error).__name__  # its message might repeat some of the text
        else:
            if mask.shape == tokens.shape and mask.dtype == np.bool_:
                return mask.copy()
            failure = f"the mask is {mask.dtype} {mask.shape}, must be bool {tokens.shape}"
        lost = pieces[-1].end - pieces[0].start
        log.warning("%d tokens are not recorded: the redaction hook failed: %s", lost, failure)
        return None


def _joined(pieces: Iterable[Passage], end: int) -> Iterator[Passage]:
    """Yield the pieces up to position `end`, joined into as few passages as possible."""
    group: list[Passage] = []
    for one in (piece.cut(0, end - piece.start) for piece in pieces if piece.start < end):
        if group and not group[-1].continues_in(one):
            yield join(group)
            group = []
        group.append(one)
    if group:
        yield join(group)


def load_hook(name: str) -> Redact:
    """Return the function that `module:function` names. Raises BadRequest."""
    module, _, function = name.partition(":")
    try:
        found: Redact = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(
            f"traffic_redact is {name!r}, which cannot be imported: {error}", field="traffic_redact"
        ) from error
    if not callable(found):
        raise BadRequest(f"traffic_redact is {name!r}, which is no function", field="traffic_redact")
    return found
