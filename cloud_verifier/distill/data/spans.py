"""Join the passages of the traffic log to spans, each the tokens of one session without a gap, and cut these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import NO_PROMPT, Passage

_SHARED = "session_id", "tenant", "traffic_class", "start", "tokens", "time_unix", "expires_unix", "prompt"
"""The fields that a span takes from its first passage."""


@dataclass(frozen=True, eq=False)
class TextSpan:
    """A run of tokens that one session generated and that was recorded without a gap."""

    session_id: str
    tenant: str
    traffic_class: str
    start: int
    """Position of its first token in the session."""
    tokens: NDArray[np.int32]
    time_unix: float
    """Seconds; when its newest passage was recorded."""
    expires_unix: float
    """Seconds; when the first of its passages expires."""
    first: int = 1
    """Index of the first labelled token; those before it are context."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT)
    """The recorded tokens before its first one: context that is never labelled. A span with a prompt has `first` 0,
    since even its first token can be predicted."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def label_count(self) -> int:
        """Return the number of tokens that a draft learns from, or is measured on."""
        return max(0, len(self.tokens) - self.first)


def join_passages(passages: Iterable[Passage]) -> list[TextSpan]:
    """Join the passages of each session, but not over gaps, changes of class or tenant, or where two disagree.

    After a failover two verifiers may have recorded the same positions; the older passage counts.
    """
    sessions: dict[tuple[str, str, str], list[Passage]] = defaultdict(list)
    for passage in passages:
        sessions[passage.session_id, passage.tenant, passage.traffic_class].append(passage)
    return [span for key in sorted(sessions) for span in _joined(sessions[key])]


def cut(span: TextSpan, window: int, overlap: int, prompt: int = 0) -> list[TextSpan]:
    """Cut a span into pieces of at most `window` tokens, context included.

    The first piece begins with the last `prompt` tokens of the span's prompt, but at most half a window of them; each
    further one begins with `overlap` tokens of the piece before. Every token is labelled in exactly one piece, but for
    the span's first where no prompt precedes it.
    """
    pieces = []
    context = span.prompt[max(0, len(span.prompt) - min(prompt, window // 2)) :]
    begin, first_label = 0, 0 if len(context) else max(1, span.first)
    while first_label < len(span.tokens):
        end = min(begin + window - len(context), len(span.tokens))
        tokens, first = span.tokens[begin:end], first_label - begin
        pieces.append(replace(span, start=span.start + begin, tokens=tokens, first=first, prompt=context))
        begin, first_label, context = max(0, end - overlap), end, NO_PROMPT
    return pieces


def _joined(passages: Iterable[Passage]) -> list[TextSpan]:
    """Return the spans of one session's passages."""
    spans: list[TextSpan] = []
    for passage in sorted(passages, key=lambda one: (one.start, one.time_unix)):
        extended = _extended(spans[-1], passage) if spans else None
        if extended is not None:
            spans[-1] = extended
            continue
        shared: dict[str, Any] = {name: getattr(passage, name) for name in _SHARED}
        spans.append(TextSpan(**shared, first=0 if len(passage.prompt) else 1))
    return spans


def _extended(span: TextSpan, passage: Passage) -> TextSpan | None:
    """Return a span with what a passage adds to its end; None if a gap lies between them or they disagree.

    The passage must not begin before the span.
    """
    known = span.end - passage.start
    shared = min(known, len(passage))
    if known < 0 or not np.array_equal(span.tokens[len(span.tokens) - known :][:shared], passage.tokens[:shared]):
        return None
    if passage.end <= span.end:
        return span
    return replace(
        span,
        tokens=np.concatenate([span.tokens, passage.tokens[known:]]),
        time_unix=max(span.time_unix, passage.time_unix),
        expires_unix=min(span.expires_unix, passage.expires_unix),
    )
