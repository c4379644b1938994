"""Define what is measured of sessions that are expected to be alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkloadKey:
    """The properties shared by sessions whose drafts are expected to be accepted alike."""

    tenant: str
    draft: str
    """Release of the device's draft."""
    traffic: str
    """Traffic class; may be empty."""
    weights: str
    """Hash of the target's weights."""


@dataclass(frozen=True)
class Prior:
    """Holds the recent measurements of sessions with one workload key."""

    acceptance_history: bytes = b""
    """Outcomes of their devices' proposals, in the order of the reports (outrider.core.acceptance.history)."""
    draft_ms: float = 0.0
    """Usual time for one level of a device's tree; 0 if not known."""
    nodes_per_level: float = 0.0
    """Usual nodes of a level; 0 if not known."""
