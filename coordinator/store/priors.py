"""Convert workload keys and priors to what Redis keeps; `lua/record_telemetry.lua` adds to the priors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.records import Prior, WorkloadKey
from coordinator.store import keys

POSITIONS = 256
"""Positions that a report's acceptance history holds at most (outrider.core.acceptance.history)."""
OUTCOMES = 256
"""Positions kept of a workload key: more than decisions are made from, and few enough to be recent."""
KEPT_MS = 86_400_000
"""A day: a prior that nobody has asked for since yesterday is measured anew."""
NO_WORKLOAD = WorkloadKey("", "", "", "")
"""Stands where a script wants a key and nothing is kept."""


def workloads(session_ids: Sequence[str], facts: Sequence[str], drafts: Sequence[str]) -> dict[str, WorkloadKey]:
    """Return the workload keys by session id, of the sessions that still draft with the release they were placed with.

    facts: tenant, weights hash, draft and traffic class of each session. drafts: the release that each is reported to
    draft with; empty if none is reported. While a history holds outcomes of two releases its session has no workload
    key.
    """
    found = {}
    for i, session_id in enumerate(session_ids):
        tenant, weights, draft, traffic = facts[4 * i : 4 * i + 4]
        if draft and drafts[i] in ("", draft):
            found[session_id] = WorkloadKey(tenant, draft, traffic, weights)
    return found


def key(workload: WorkloadKey) -> str:
    return keys.prior(workload.tenant, workload.draft, workload.traffic, workload.weights)


def prior_from(record: Mapping[str, str]) -> Prior:
    return Prior(
        bytes(int(digit) for digit in record.get("acceptance_history", "")),
        float(record.get("draft_ms", 0)),
        float(record.get("nodes_per_level", 0)),
    )


def digits(history: bytes) -> str:
    """Return an acceptance history as text, a digit for each position, for scripts and hashes."""
    return "".join(map(str, history))
