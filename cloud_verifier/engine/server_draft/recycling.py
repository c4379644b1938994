"""Propose what the target last found likely after the same token, rejected rows included (token recycling).

Every row that the target evaluates gives its likeliest next tokens, also that of a node which was not accepted. They
are kept by the row's token, in one table for each tenant: what another tenant's sessions held would show in the time of
a step. After Luo et al., "Turning trash into treasure" (arXiv 2408.08696), whose table has no probabilities; ours has
them, so that the session's noise can rank what may follow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.server_draft.base import CHILDREN, EvaluatedRows, ProposalRequest, ProposedTree, grow
from cloud_verifier.engine.session import EngineSession
from outrider.core.proposals import Proposal, propose_among

SUCCESSORS = 8
"""Tokens that are kept after each token, as many as in the paper."""
TABLES = 256
"""Tenants, and sessions without one, with a table; the one that was not seen for longest is forgotten."""
TOKENS = 16_384
"""Tokens of a tenant that have successors: 1.5 MiB at most. The ones that were not seen for longest are forgotten."""

_Table = tuple[OrderedDict[int, int], NDArray[np.int64], NDArray[np.float32]]
"""Token -> row of the arrays `[TOKENS, SUCCESSORS]`: ids, and their log-probabilities, -inf where there is no more."""


class RecyclingSource:
    """Implements ServerSource by a table for each tenant: token -> its likely successors, with log-probabilities."""

    name = "recycling"
    max_sessions = 1 << 20
    wants_top = SUCCESSORS
    wants_hidden = False
    pauses = True
    read = 0, 0.0

    def __init__(self) -> None:
        self._tables: OrderedDict[str, _Table] = OrderedDict()

    def unread(self, session: EngineSession) -> int:
        return 0

    def propose(self, requests: Sequence[ProposalRequest]) -> dict[str, ProposedTree]:
        known = [(one, self._table(one.session.salt)) for one in requests]
        return {one.session.session_id: grow(one, partial(_children, table, one.session)) for one, table in known}

    def observe(self, session: EngineSession, rows: EvaluatedRows) -> None:
        if rows.top_ids is None or rows.top_log_probs is None:
            return
        places, all_ids, all_log_probs = self._table(session.salt)
        tokens = rows.tokens[len(rows.tokens) - len(rows.top_ids) :]
        for token, ids, log_probs in zip(tokens, rows.top_ids, rows.top_log_probs, strict=True):
            place = places.pop(token, None)
            if place is None:
                place = len(places) if len(places) < TOKENS else places.popitem(last=False)[1]
            places[token] = place
            all_ids[place, : len(ids)], all_log_probs[place, : len(ids)] = ids, log_probs
            all_log_probs[place, len(ids) :] = -np.inf

    def release(self, session_id: str) -> None:
        """Keep what was learned, which is the tenant's, unless the session has a salt of its own: its id."""
        self._tables.pop(session_id, None)

    def _table(self, salt: str) -> _Table:
        table = self._tables.pop(salt, None)
        shape = TOKENS, SUCCESSORS  # memory of rows that are never written is never taken
        table = table or (OrderedDict(), np.empty(shape, np.int64), np.empty(shape, np.float32))
        self._tables[salt] = table
        while len(self._tables) > TABLES:
            self._tables.popitem(last=False)
        return table


def _children(table: _Table, session: EngineSession, path: Sequence[int]) -> list[Proposal]:
    """Return the children of the last token of the path that its last row and the session's noise make likeliest."""
    places, all_ids, all_log_probs = table
    place = places.get(path[-1] if path else session.tokens[-1])
    if place is None:
        return []
    sampler = session.sampler
    known = all_log_probs[place] > -np.inf
    ids, log_q = all_ids[place][known], all_log_probs[place][known].astype(np.float64)
    if not sampler.params.greedy:
        # At the session's temperature, with the rest of the probability as if it was one token's.
        scaled = log_q / sampler.params.temperature
        rest = max(1e-9, 1.0 - float(np.exp(log_q).sum())) ** (1.0 / sampler.params.temperature)
        log_q = scaled - np.log(np.exp(scaled).sum() + rest)
    return propose_among(ids, log_q, sampler.params, sampler.key, session.protocol.position + len(path), CHILDREN)
