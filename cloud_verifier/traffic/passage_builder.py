"""Join what sessions produced, one step at a time, into passages, without the tokens that a redaction hook finds.

A hook sees a session's text as one, by position, whatever drafts its device used and however often its stream was
opened anew; only what the hook leaves is split by draft again.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import Passage, join
from outrider.core.errors import BadRequest

log = logging.getLogger(__name__)

REDACTION_CONTEXT = 32
"""Tokens beside a gap that are not recorded if there is a hook, which must see whole what it is to find. As many ids
before the kept part of a prompt are shown to the hook."""
QUIET_S = 60.0
"""Seconds without a new token after which a text is taken to have ended."""
Redact = Callable[[NDArray[np.int32], str, str], Any]
"""The operator's hook: (tokens `[n]`, traffic class, tenant) -> mask `[n]`, true where a token must not be recorded."""


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


class PassageBuilder:
    """Collects the pieces of all recorded sessions, and hands them out as passages.

    With a hook a session's text waits until it has ended or pauses, so that the hook sees all of it.
    """

    def __init__(self, redact: Redact | None, counts: RecordingCounts, prompt_tokens: int = 0) -> None:
        """Keep the last `prompt_tokens` ids of a prompt that may be kept."""
        self._redact = redact
        self._prompt_tokens = prompt_tokens
        self._counts = counts
        self._texts: dict[str, list[Passage]] = {}
        """session id -> the pieces of its text, in the order in which they came"""
        self.tokens = 0
        """Tokens added since the last `take`."""
        self.waiting = 0
        """Tokens added and not taken."""

    def add(self, piece: Passage) -> None:
        """Add what one session produced in one step."""
        self._texts.setdefault(piece.session_id, []).append(piece)
        self.tokens += len(piece)
        self.waiting += len(piece)

    def take(self, now: float, final: bool = False) -> Iterator[Passage]:
        """Yield the passages to be written. now: seconds since 1970. final: nothing more will come."""
        for session_id, pieces in list(self._texts.items()):
            if self._redact is None or final or now >= pieces[-1].time_unix + QUIET_S:
                del self._texts[session_id]
                self.waiting -= sum(map(len, pieces))
                parts = _grouped(pieces, lambda one, other: one.end == other.start)
                for number, part in enumerate(parts):
                    yield from self._redacted(part, after_gap=number > 0, before_gap=number + 1 < len(parts))
        self.tokens = 0

    def _redacted(self, pieces: list[Passage], *, after_gap: bool, before_gap: bool) -> Iterator[Passage]:
        """Yield what the hook leaves of consecutive pieces, joined into as few passages as possible.

        Tokens beside a gap may be a part of what the hook would have found, had it seen the whole: they are hidden.
        """
        prompt, start = pieces[0].prompt, pieces[0].start
        mask = self._mask(pieces)
        if mask is None:
            self._counts.refused += pieces[-1].end - start
            return
        hidden = mask[len(prompt) :]
        if self._redact is not None and after_gap:
            hidden[:REDACTION_CONTEXT] = True
        if self._redact is not None and before_gap:
            hidden[-REDACTION_CONTEXT:] = True
        self._counts.redacted += int(hidden.sum())
        # Of the prompt the last ids, behind all that is hidden in it: context must reach up to the text.
        found = np.flatnonzero(mask[: len(prompt)])
        begin = max(int(found[-1]) + 1 if len(found) else 0, len(prompt) - self._prompt_tokens)
        pieces[0] = replace(pieces[0], prompt=prompt[begin:])
        for group in _grouped(pieces, Passage.continues_in):
            one = join(group)
            yield from one.without(hidden[one.start - start : one.end - start])

    def _mask(self, pieces: Sequence[Passage]) -> NDArray[np.bool_] | None:
        """Return which ids of the prompt and of all pieces are hidden, `[p + n]`.

        None if the hook fails: then nothing is known of the text, and it is not recorded.
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


def _grouped(pieces: Iterable[Passage], together: Callable[[Passage, Passage], bool]) -> list[list[Passage]]:
    """Divide pieces into groups of neighbours that belong together."""
    groups: list[list[Passage]] = []
    for one in pieces:
        if groups and together(groups[-1][-1], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def load_hook(name: str) -> Redact:
    """Return the function that `module:function` names. Raises BadRequest."""
    try:
        found: Redact = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(
            f"traffic_redact is {name!r}, which cannot be imported: {error}", field="traffic_redact"
        ) from error
    if not callable(found):
        raise BadRequest(f"traffic_redact is {name!r}, which is no function", field="traffic_redact")
    return found
