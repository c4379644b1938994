"""On what terms a session is served."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.protocol.messages import SessionLimits
from outrider.wire.ticket import Claims


@dataclass(frozen=True)
class Terms:
    """As its ticket has them; without a ticket nothing is known of it and nothing may be recorded."""

    limits: SessionLimits
    tenant: str = "default"
    draft_release: str = ""
    """That its device drafts with at first."""
    traffic_class: str = ""
    keep_s: float = 0.0
    """Seconds that what is produced may be kept on record; 0: nothing of it may."""
    keep_prompts: bool = False
    """Whether the prompt may be kept as long."""

    @classmethod
    def of(cls, claims: Claims) -> Terms:
        return cls(
            claims.limits,
            claims.tenant,
            claims.draft_release,
            claims.traffic_class,
            claims.keep_s,
            claims.keep_prompts,
        )
