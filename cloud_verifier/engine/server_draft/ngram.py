"""Propose what followed the same tokens earlier in a session's own text, prompt and output, without any model.

The verifier knows every session's text, so that devices gain from it that send no node at all (outrider.core.ngram).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cloud_verifier.engine.nodes import ProposedTree
from cloud_verifier.engine.server_draft.base import CHILDREN, USUAL_TOKENS, ProposalRequest, ServerSource, grow
from cloud_verifier.engine.session import EngineSession
from outrider.core.ngram import NgramModel
from outrider.core.proposals import Proposal, propose_among


@dataclass(eq=False)
class _Text:
    """Holds a model of a session's text, with how much of it the model has read."""

    model: NgramModel
    read: int = 0
    """Tokens of the session."""
    reading: Future[None] | None = None
    """While they are read on another thread."""


class ServerNgramSource(ServerSource):
    """Proposes by one model for each session. What is more than a few tokens is read on another thread, about a
    microsecond for each, and no step waits for it."""

    name = "ngram"

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, _Text] = {}
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ngram")

    def propose(self, requests: Sequence[ProposalRequest]) -> dict[str, ProposedTree]:
        ready = [(one, model) for one in requests if (model := self._model(one.session)) is not None]
        return {one.session.session_id: grow(one, partial(_children, model, one.session)) for one, model in ready}

    def release(self, session_id: str) -> None:
        text = self._texts.pop(session_id, None)
        if text is not None and text.reading is not None:
            text.reading.cancel()

    def _model(self, session: EngineSession) -> NgramModel | None:
        """Return the session's model when it has read all; None while that goes on."""
        text = self._texts.setdefault(session.session_id, _Text(NgramModel()))
        if text.reading is not None:
            if not text.reading.done():
                return None
            text.reading = text.reading.result()
        new, text.read = session.tokens[text.read :], len(session.tokens)
        if len(new) > USUAL_TOKENS:
            text.reading = self._reader.submit(text.model.reset, list(session.tokens))
            return None
        text.model.extend(new)
        return text.model


def _children(model: NgramModel, session: EngineSession, path: Sequence[int]) -> list[Proposal]:
    """Return the children that the text so far and the session's noise make likeliest."""
    sampler = session.sampler
    ids, log_q = model.following(path)
    return propose_among(ids, log_q, sampler.params, sampler.key, session.protocol.position + len(path), CHILDREN)
