"""Turn token ids into text as they come: whole characters only, no special tokens, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence


class Detokenizer:
    """Reads tokens' bytes incrementally as UTF-8; returned text never changes afterwards.

    A character that is split across tokens, or across Commits, comes with its last byte, and not at all if that never
    comes; invalid bytes become U+FFFD. special: ids that are no text.
    """

    def __init__(self, table: Sequence[bytes], special: Collection[int] = ()) -> None:
        self._table = table
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._special or token >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token])


class StopScanner:
    """Passes text on until a stop string appears, and holds back a possible beginning of one.

    Stop strings that are complete within the first `min_tokens` tokens do not count, as in vLLM.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._early = min_tokens
        """Tokens that must still come before a stop string counts; below 0 afterwards."""
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """Take one more token's text. Return what certainly precedes any stop string; "" once one was found."""
        self._early -= 1
        return self._scanned(text)

    def _scanned(self, text: str) -> str:
        if self.hit:
            return ""
        self._held += text
        stops = self._stops if self._early < 0 else ()
        found = [at for stop in stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed

    def flush(self) -> str:
        """Return the held text, which has turned out not to be a stop string."""
        passed, self._held = self._held, ""
        return passed


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def text_of(
    tokens: Sequence[int], detokenizer: Detokenizer, stops: StopScanner, *, last: bool
) -> tuple[str, int, bool]:
    """Return the text of one delivery, how many of its tokens count, and whether a stop string has ended the text.

    Tokens count up to the one that completes a stop string. last: no more tokens will come.
    """
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += stops.feed(detokenizer.feed(token))
        if stops.hit:
            return text, count, True
    if last:
        text += stops.flush()
    return text, len(tokens), stops.hit
