"""What `outrider status` and `outrider window show` print."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.wire.v1 import coordinator_pb2 as pb


def describe(status: pb.StatusResponse) -> str:
    """Uptime and store, then a table of the verifiers and one of the sessions."""
    return "\n\n".join(
        (
            f"up {status.uptime_s:.0f} s, store {status.store}",
            table(_VERIFIER_COLUMNS, [_verifier_row(verifier) for verifier in status.verifiers]),
            table(_COST_COLUMNS, [_cost_row(verifier) for verifier in status.verifiers]),
            table(_SESSION_COLUMNS, [_session_row(session) for session in status.sessions]),
        )
    )


def describe_windows(shown: pb.ShowWindowsResponse) -> str:
    """What holds for everybody, then a table of the decisions with what they were made from."""
    everybody = _bounds(shown.everybody) if shown.HasField("everybody") else "none"
    if not shown.windows:
        return (
            f"bounds for all: {everybody}\n\nnothing has been decided, for too little is known of any such session yet"
        )
    return f"bounds for all: {everybody}\n\n{table(_WINDOW_COLUMNS, [_window_row(w) for w in shown.windows])}"


_WINDOW_COLUMNS = (
    *("SESSION", "VERIFIER", "K", "DEPTH", "PER LEVEL", "PATIENCE", "PRICE", "SPEED-UP", "TOKENS/STEP"),
    *("HITS", "RTT", "DRAFT", "BOUNDS", "REASON"),
)
"""Speed-up, over streaming, and tokens per step are predicted; hits are first guesses that were right, and of how many,
those of the session's class included while it has few of its own."""
_VERIFIER_COLUMNS = ("VERIFIER", "ADDRESS", "TARGET", "SESSIONS", "STEP", "NODE", "TOKENS/S", "KV", "LEASE", "STATE")
_COST_ROWS = (1, 8, 32, 128, 512)
_COST_COLUMNS = ("VERIFIER", *(f"{rows} ROWS" for rows in _COST_ROWS), "SESSION")
"""Of a step, by the verifier's cost model: so many rows of one session, and each further session."""
_SESSION_COLUMNS = ("SESSION", "TENANT", "VERIFIER", "COMMITTED", "TOKENS/STEP", "RTT")


def _verifier_row(verifier: pb.VerifierStatus) -> tuple[str, ...]:
    return (
        verifier.verifier_id,
        verifier.address,
        f"{verifier.target.name} {verifier.target.dtype}",
        f"{verifier.live_sessions}/{verifier.capacity_sessions}",
        f"{verifier.step_ms:.1f} ms",
        f"{verifier.node_ms:.2f} ms",
        f"{verifier.tokens_per_s:.0f}",
        f"{verifier.kv_used}/{verifier.kv_capacity}",
        f"{verifier.lease_s:.1f} s",
        "draining" if verifier.draining else "serving",
    )


def _cost_row(verifier: pb.VerifierStatus) -> tuple[str, ...]:
    cost_ms = verifier.step_cost_ms
    known = (f"{cost_ms[rows]:.1f} ms" if rows in cost_ms else "-" for rows in _COST_ROWS)
    return (verifier.verifier_id, *known, f"{verifier.session_cost_ms:.2f} ms")


def _session_row(session: pb.SessionStatus) -> tuple[str, ...]:
    return (
        session.session_id,
        session.tenant,
        session.verifier_id,
        str(session.committed),
        f"{session.tokens_per_step:.2f}",
        f"{session.rtt_ms:.1f} ms",
    )


def _window_row(window: pb.SessionWindow) -> tuple[str, ...]:
    return (
        window.session_id,
        window.verifier_id,
        str(window.k),
        str(window.depth),
        f"{window.nodes_per_level:.1f}",
        f"{window.patience_ms:.0f} ms",
        f"{window.price:.2f}",
        f"{window.speedup:.2f}",
        f"{window.tokens_per_step:.2f}",
        f"{window.hits:.2f} of {window.verdicts}",
        f"{window.rtt_ms:.1f} ms",
        f"{window.draft_ms:.1f} ms",
        _bounds(window.bounds) if window.HasField("bounds") else "-",
        window.reason,
    )


def _bounds(bounds: pb.WindowBounds) -> str:
    patience = f", {bounds.patience_ms:.0f} ms" if bounds.HasField("patience_ms") else ""
    per_level = f", {bounds.nodes_per_level:.1f} a level" if bounds.HasField("nodes_per_level") else ""
    return f"{'=' if bounds.pinned else '<='} k {bounds.k}, depth {bounds.depth}{patience}{per_level}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of text, each column as wide as it needs."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    )
