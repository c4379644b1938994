"""Propose what followed the same tokens earlier in a session's own text, prompt and output, without any model.

The verifier knows every session's text, so that devices gain from it that send no node at all (outrider.core.ngram).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cloud_verifier.engine.nodes import ProposedTree
from cloud_verifier.engine.server_draft.base import (
    CHILDREN,
    USUAL_TOKENS,
    EvaluatedRows,
    ProposalRequest,
    grow,
)
from cloud_verifier.engine.session import EngineSession
from outrider.core.ngram import NgramModel
from outrider.core.proposals import Proposal, propose_among

LONG = 2_048
"""Tokens that are read in one step, over all sessions, about a microsecond each; the others wait for a later one. A
text with more is read on another thread."""
APPENDED = 8
"""Tokens of a whole text that are read in the time in which one is appended."""


@dataclass(eq=False)
class _Text:
    """Holds a model of a session's text, with how much of it the model has read."""

    model: NgramModel
    read: int
    """Tokens of the session."""
    reading: Future[None] | None = None
    """While they are read on another thread."""


class NgramSource:
    """Implements ServerSource by one model for each session."""

    name = "ngram"
    wants_hidden = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.read_s = 0.0
        self._clock = clock
        self._texts: dict[str, _Text] = {}
        self._left = 0
        """Tokens that may yet be read in this step."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ngram")

    def propose(self, requests: Sequence[ProposalRequest]) -> dict[str, ProposedTree]:
        self.read_s, self._left = 0.0, LONG
        ready = [(one, model) for one in requests if (model := self._model(one.session)) is not None]
        return {one.session.session_id: grow(one, partial(_children, model, one.session)) for one, model in ready}

    def observe(self, session: EngineSession, rows: EvaluatedRows) -> None:
        """Learn nothing: the text is read with the next proposal."""

    def release(self, session_id: str) -> None:
        text = self._texts.pop(session_id, None)
        if text is not None and text.reading is not None:
            text.reading.cancel()

    def _model(self, session: EngineSession) -> NgramModel | None:
        """Return the session's model when it has read all; None while it has to wait for that."""
        text = self._texts.get(session.session_id)
        if text is not None and text.reading is not None:
            if not text.reading.done():
                return None
            text.reading = text.reading.result()
        tokens = session.tokens
        new = tokens[text.read if text else 0 :]
        if text is not None and len(new) <= USUAL_TOKENS:
            text.model.extend(new)
            text.read = len(tokens)
            return text.model
        cost = min(APPENDED * len(new), len(tokens)) if text else len(tokens)
        if self._left < cost <= LONG:
            return None
        if text is None:
            text = self._texts[session.session_id] = _Text(NgramModel(), 0)
        text.read = len(tokens)
        if cost > LONG:
            text.reading = self._reader.submit(text.model.reset, list(tokens))
            return None
        self._left -= cost
        begun = self._clock()
        text.model.extend(new) if cost < len(tokens) else text.model.reset(tokens)
        self.read_s += self._clock() - begun
        return text.model


def _children(model: NgramModel, session: EngineSession, path: Sequence[int]) -> list[Proposal]:
    """Return the children that the text so far and the session's noise make likeliest."""
    sampler = session.sampler
    ids, log_q = model.following(path)
    return propose_among(ids, log_q, sampler.params, sampler.key, session.protocol.position + len(path), CHILDREN)
