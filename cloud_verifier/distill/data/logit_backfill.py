"""Fill in the target's distributions of the spans that were chosen, which are chosen without them to save memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.data.spans import TextSpan
from cloud_verifier.distill.data.texts import Text
from cloud_verifier.traffic.passage import Passage


class LogitBackfill:
    """Takes passages in any order, and makes a text of every span that they cover."""

    def __init__(self, spans: Iterable[TextSpan], top: int) -> None:
        """top: K, the number of the likeliest ids kept of a position; the probability of others goes to the tail."""
        self._top = top
        self._texts: dict[TextSpan, tuple[Text, NDArray[np.bool_]]] = {}
        """The text of each span, and which of the span's tokens have their distribution, `[n]`."""
        self._by_session: dict[tuple[str, str, str], list[TextSpan]] = defaultdict(list)
        numbers: dict[str, int] = {}
        for span in spans:
            text = _empty_text(span, top, numbers.setdefault(span.session_id, len(numbers)))
            self._texts[span] = text, np.zeros(len(span.tokens), bool)
            self._by_session[span.session_id, span.tenant, span.traffic_class].append(span)

    def add(self, passage: Passage) -> None:
        """Copy the distributions of all positions that the passage shares with any span."""
        for span in self._by_session.get((passage.session_id, passage.tenant, passage.traffic_class), ()):
            self._fill(span, passage)

    def covers(self, span: TextSpan) -> bool:
        """Return whether all labels of a span have their distribution."""
        _, known = self._texts[span]
        return bool(known[span.first :].all())

    def text(self, span: TextSpan) -> Text:
        """Return the text of a span that is covered."""
        return self._texts[span][0]

    def _fill(self, span: TextSpan, passage: Passage) -> None:
        begin, end = max(span.start, passage.start), min(span.end, passage.end)
        here = slice(begin - span.start, end - span.start)
        there = slice(begin - passage.start, end - passage.start)
        if begin >= end or not np.array_equal(span.tokens[here], passage.tokens[there]):
            return  # they share no positions, or another verifier recorded other tokens there
        text, known = self._texts[span]
        rows = slice(here.start + len(span.prompt), here.stop + len(span.prompt))
        top = min(self._top, passage.top)
        text.top_ids[rows, :top] = passage.top_ids[there, :top]
        text.top_log_probs[rows, :top] = passage.top_log_probs[there, :top]
        beyond = np.exp(passage.top_log_probs[there, top:]).sum(1)
        text.tail[rows] = np.clip(passage.tail[there] + beyond, 0.0, 1.0)
        known[here] = True


def _empty_text(span: TextSpan, top: int, session: int) -> Text:
    """Return a span with its prompt as a text without distributions."""
    tokens = np.concatenate([span.prompt, span.tokens])
    return Text(
        span.traffic_class,
        span.tenant,
        tokens,
        np.full((len(tokens), top), -1, np.int32),
        np.full((len(tokens), top), -np.inf, np.float32),
        np.zeros(len(tokens), np.float32),
        len(span.prompt) + span.first,
        session,
    )
