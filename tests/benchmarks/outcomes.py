"""Make outcomes of sessions that were never played."""

from __future__ import annotations

from benchmarks.support.draft_replay.client import SessionOutcome


def outcome(
    seconds: float, tokens: int = 100, first_token_s: float = 0.1, per_step: int = 1, session_id: str = ""
) -> SessionOutcome:
    """Return an outcome with deliveries of `per_step` tokens at an even pace."""
    steps = tokens // per_step
    pause = (seconds - first_token_s) / (steps - 1)
    return SessionOutcome(
        tokens=tokens,
        steps=steps,
        first_token_s=first_token_s,
        seconds=seconds,
        gaps_ms=[1e3 * pause] * (steps - 1),
        delivered_s=[50.0 + first_token_s + i // per_step * pause for i in range(tokens)],
        wire_up=40 * tokens,
        wire_down=20 * tokens,
        appends=tokens,
        session_id=session_id,
        finish="length",
    )
