"""Join the passages of the traffic log to spans, each the tokens of one session without a gap, and cut these.

Spans and their pieces are passages, too. Every token of a piece is a label, to learn from or to measure on; its prompt
is context that is never labelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from cloud_verifier.traffic.passage import Passage, join


def join_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Join the passages of each session, but not over gaps, changes of class or tenant, or where two disagree.

    After a failover two verifiers may have recorded the same positions; the older passage counts.
    """
    sessions: dict[tuple[str, str, str], list[Passage]] = defaultdict(list)
    for passage in passages:
        sessions[passage.session_id, passage.tenant, passage.traffic_class].append(passage)
    return [span for key in sorted(sessions) for span in _spans(sessions[key])]


def cut(span: Passage, window: int, overlap: int, prompt: int = 0) -> Iterator[Passage]:
    """Cut a span into pieces of at most `window` tokens, context included.

    The first piece has the last `prompt` tokens of the span's prompt before it, but at most half a window of them; each
    further one the last `overlap` tokens of the piece before. Every token is in exactly one piece, but for the span's
    first where no prompt precedes it: it is context.
    """
    context, at = span.prompt[max(0, len(span.prompt) - min(prompt, window // 2)) :], 0
    if not len(context):
        context, at = span.tokens[:1], 1
    while at < len(span):
        end = min(at + window - len(context), len(span))
        yield replace(span.cut(at, end), prompt=context)
        context, at = span.tokens[max(0, end - overlap) : end], end


def _spans(passages: Iterable[Passage]) -> list[Passage]:
    """Return the spans of one session's passages."""
    spans: list[list[Passage]] = []
    """Parts of each span; each begins where the one before ends."""
    for passage in sorted(passages, key=lambda one: (one.start, one.time_unix)):
        if spans and (known := _known(spans[-1], passage)) is not None:
            spans[-1] += [passage.cut(known, len(passage))] if known < len(passage) else []
        else:
            spans.append([passage])
    return [replace(join(parts), time_unix=max(one.time_unix for one in parts)) for parts in spans]


def _known(parts: list[Passage], passage: Passage) -> int | None:
    """Return how many tokens of a passage a span has already; None if a gap lies between them or they disagree.

    The passage must not begin before the span.
    """
    known = parts[-1].end - passage.start
    if known < 0:
        return None
    reached = [part.cut(max(0, passage.start - part.start), len(part)) for part in parts if part.end > passage.start]
    before = np.concatenate([part.tokens for part in reached]) if reached else passage.tokens[:0]
    shared = min(known, len(passage))
    return known if np.array_equal(before[:shared], passage.tokens[:shared]) else None
