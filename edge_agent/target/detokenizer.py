"""From token ids to text while they come: whole characters only, special tokens silent, stop strings honoured."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edge_agent.validation import items, refuse
from outrider.core.errors import BadRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class Detokeniser:
    """Bytes of tokens through an incremental UTF-8 decoder: what was returned once never changes.

    A character that is split across tokens, or across Commits, comes with its last byte; bytes that are no UTF-8 come
    as U+FFFD. Special tokens are not text.
    """

    def __init__(self, table: Sequence[bytes], special: Collection[int] = ()) -> None:
        self._table = table
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._special or token >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """What an unfinished character at the end comes to."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Passes text on until a stop string appears, also one that comes in pieces; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """Text that is certain to come before any stop string; "" after one was found."""
        if self.hit:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed

    def flush(self) -> str:
        """What was held back in vain."""
        passed, self._held = self._held, ""
        return passed


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def check_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings of a request. Raises BadRequest."""
    stops = (stop,) if isinstance(stop, str) else items("stop", () if stop is None else stop, "texts")
    if len(stops) > MAX_STOPS:
        raise BadRequest.bound("number of stop strings", len(stops), f"at most {MAX_STOPS}")
    return tuple(_checked(text) for text in stops)


def _checked(stop: object) -> str:
    if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
        refuse("a stop string", stop, f"1 to {MAX_STOP_CHARS} characters")
    return stop


@dataclass(frozen=True)
class Piece:
    """What one delivery comes to."""

    text: str
    tokens: int
    """How many of the delivered tokens count: those up to the one that completed a stop string."""
    stopped: bool


class TextAssembler:
    """Detokeniser and stop scanner of one request."""

    def __init__(self, table: Sequence[bytes], special: Collection[int], stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(table, special)
        self._scanner = StopScanner(stops)

    def feed(self, tokens: Sequence[int], *, last: bool) -> Piece:
        """last: no more tokens will come."""
        text = ""
        for count, token in enumerate(tokens, start=1):
            text += self._scanner.feed(self._detokeniser.feed(token))
            if self._scanner.hit:
                return Piece(text, count, True)
        if last:
            text += self._scanner.feed(self._detokeniser.flush())
            hit = self._scanner.hit
            text += self._scanner.flush()
            return Piece(text, len(tokens), hit)
        return Piece(text, len(tokens), False)
