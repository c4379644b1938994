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
class Window:
    """The extent to which a session speculates. A level is the proposal for one position, with its siblings."""

    k: int = 0
    """Speculation length: levels that one step verifies, at most; 0 is no speculation."""
    depth: int = 0
    """Window depth: levels that the device drafts ahead of the last token that it knows, at most."""
    draft_wait_ms: float | None = None
    """Time that the verifier waits for nodes before a plain step. None leaves it to the coordinator; it counts as 0."""
    nodes_per_level: float | None = None
    """The first proposal of a level and its siblings. None leaves it to the coordinator; it counts as 1."""


@dataclass(frozen=True)
class WindowBounds:
    """The widest window that an operator allows a session, or all sessions that have no bounds of their own."""

    window: Window
    pinned: bool = False
    """The session has exactly this window, whatever the measurements say."""


@dataclass(frozen=True)
class WindowDecision:
    """The window that was decided for a session, what it was decided from and what is predicted of it."""

    session_id: str
    epoch: int
    window: Window
    min_acceptance: float
    """Commits that a node must bring to pay for its time, 0 to 1."""
    speedup: float
    """Predicted, over no speculation."""
    tokens_per_step: float
    """Predicted."""
    reason: str
    rtt_ms: float
    draft_ms: float
    observations: int
    """Positions of the acceptance history that the decision was made from."""
    first_acceptance: float
    """Share of these positions whose first proposal was accepted."""
    max_k: int = 0
    """Levels that the verifier may evaluate in a step where that pays; window.k is what was counted on."""
    step_ms: float = 0.0
    """Predicted length of the verifier's steps; 0 if not known."""
    verifier_id: str = ""
    """Verifier of the session; filled in by the store."""


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
