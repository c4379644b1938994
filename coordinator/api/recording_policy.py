"""Decide what verifiers may record of each tenant's sessions: nothing, unless the operator allows it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import BadRequest

DAY_S = 86_400.0
MAX_KEEP_DAYS = 3_650.0


@dataclass(frozen=True)
class RecordingPolicy:
    """The extent to which one tenant's sessions may be recorded."""

    share: float = 0.0
    """Share of the sessions that may be recorded, from 0 to 1."""
    keep_s: float = 0.0
    """Longest time that a record is kept."""
    prompts: bool = False
    """Whether prompts are recorded beside what the target produced."""

    def keep_s_of(self, session_id: str) -> float:
        """Return keep_s for this session, 0 if nothing of it may be recorded.

        The session is drawn by its id, which the coordinator makes at random: the draw can be repeated, and no caller
        can choose it.
        """
        digest = hashlib.sha256(f"recording:{session_id}".encode()).digest()
        return self.keep_s if int.from_bytes(digest[:8]) < self.share * 2**64 else 0.0


def policies(tables: Any, tenants: Mapping[str, str], where: str) -> dict[str, RecordingPolicy]:
    """Return the policies of the tables `[recording.NAME]` of a tenants file, by tenant. Raises BadRequest."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise BadRequest(
            f"{where}: recording must be tables [recording.NAME] of share, keep_days and, if need be, prompts",
            field="recording",
        )
    return {name: _policy(name, table, tenants, where) for name, table in tables.items()}


def _policy(name: str, table: Mapping[str, Any], tenants: Mapping[str, str], where: str) -> RecordingPolicy:
    if name not in tenants:
        raise BadRequest(
            f"{where}: [recording.{name}] is for a tenant that has no key; check its name", field="recording"
        )
    if {*table, "prompts"} != {"share", "keep_days", "prompts"}:
        raise BadRequest(
            f"{where}: [recording.{name}] has {sorted(table)}, must have share and keep_days, and may have prompts",
            field="recording",
        )
    prompts = table.get("prompts", False)
    if not isinstance(prompts, bool):
        raise BadRequest.bound(f"{where}: prompts of [recording.{name}]", repr(prompts)[:100], "true or false")
    share = _number(f"{where}: share of [recording.{name}]", table["share"], 0.0, 1.0)
    days = _number(f"{where}: keep_days of [recording.{name}]", table["keep_days"], 1e-3, MAX_KEEP_DAYS)
    return RecordingPolicy(share, days * DAY_S, prompts)


def _number(what: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest.bound(what, repr(value)[:100], f"a number from {low:g} to {high:g}")
    return float(value)
