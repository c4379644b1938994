"""Kinds of sessions and what was seen of them, as the store keeps it; `lua/observe.lua` adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.records import Prior, WorkloadKey
from coordinator.store import keys

POSITIONS = 256
"""Positions that a report's acceptance history holds at most (outrider.core.acceptance.history)."""
OUTCOMES = 256
"""Positions kept of a workload key: more than decisions are made from, and few enough to be of today."""
KEPT_MS = 86_400_000
"""A day: a prior that nobody has asked for since yesterday is measured anew."""
NO_KIND = WorkloadKey("", "", "", "")
"""Stands where a script wants a key and nothing is kept."""


def kinds(session_ids: Sequence[str], facts: Sequence[str], drafts: Sequence[str]) -> dict[str, WorkloadKey]:
    """Session id -> kind, of those that have a draft, and still the one that they were placed with.

    facts: tenant, weights, draft and traffic class of each. drafts: what each is reported to draft with, where it is.
    """
    found = {}
    for i, session_id in enumerate(session_ids):
        tenant, weights, draft, traffic = facts[4 * i : 4 * i + 4]
        if draft and drafts[i] in ("", draft):  # outcomes of two drafts are mixed for a while: of no kind
            found[session_id] = WorkloadKey(tenant, draft, traffic, weights)
    return found


def key(kind: WorkloadKey) -> str:
    return keys.prior(kind.tenant, kind.draft, kind.traffic, kind.weights)


def read(record: Mapping[str, str]) -> Prior:
    return Prior(
        bytes(int(digit) for digit in record.get("acceptance_history", "")),
        float(record.get("draft_ms", 0)),
        float(record.get("nodes_per_level", 0)),
    )


def digits(history: bytes) -> str:
    """Return an acceptance history as text, a digit for each position, for scripts and hashes."""
    return "".join(map(str, history))
