"""Define the values that the coordinator's servicers, stores and window control exchange."""

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


@dataclass(frozen=True)
class PlacementRequest:
    """The requirements of a session on the verifier that is to serve it."""

    target: str = ""
    """Name of the target; empty if the cluster serves just one. If `weights` is given, it is for messages only."""
    weights: tuple[str, str] | None = None
    """Weights and tokenizer hash that the session is bound to; None binds it to those of the verifier chosen."""
    failed: frozenset[str] = frozenset()
    """Verifiers to avoid while any other has room."""
    draft: str = ""
    """Release of the device's draft; empty if it has none."""
    traffic: str = ""
    """Traffic class; may be empty."""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 if the session will generate nothing."""
    device_id: str = ""
    """Id by which the device is drawn for trials of drafts, as it says itself; empty if it has none."""
