"""Tables of verifiers, sessions, windows and tenants, from their documents."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.cli.json_views import Document
from outrider.core.text import table

SHORT = 12
"""Letters of a hash that are shown."""
_COST_ROWS = (1, 8, 32, 128, 512)


def verifiers(found: Sequence[Document]) -> str:
    columns = ("VERIFIER", "ADDRESS", "TARGET", "SESSIONS", "TOKENS/S", "STEP", "NODE", "PRICE", "ACCEPTED", "RTT")
    return table((*columns, "KV", "LEASE", "STATE"), list(map(_verifier, found)))


def costs(found: Sequence[Document]) -> str:
    """Of a step, by the verifier's cost model: so many rows of one session, and each further session."""
    columns = ("VERIFIER", *(f"{rows} ROWS" for rows in _COST_ROWS), "SESSION")
    return table(columns, list(map(_cost, found)))


def sessions(found: Sequence[Document]) -> str:
    columns = ("SESSION", "TENANT", "VERIFIER", "STATE", "COMMITTED", "TOKENS/STEP", "ACCEPTED", "RTT", "DRAFT")
    return table((*columns, "CLASS"), list(map(_session, found)))


def windows(found: Sequence[Document]) -> str:
    """Speed-up, over streaming, and tokens per step are predicted; hits are first guesses that were right, and of how
    many, those of the session's class included while it has few of its own."""
    columns = ("SESSION", "VERIFIER", "K", "DEPTH", "PER LEVEL", "PATIENCE", "PRICE", "SPEED-UP", "TOKENS/STEP")
    return table((*columns, "HITS", "RTT", "DRAFT", "BOUNDS", "REASON"), list(map(_window, found)))


def tenants(found: Sequence[Document]) -> str:
    rows = [(t["name"], t["state"], t["created"] or "-", t["revoked"] or "-") for t in found]
    return table(("TENANT", "STATE", "CREATED", "REVOKED"), rows)


def bounds(b: Document) -> str:
    """Of a window, in words."""
    draft_wait = f", {b['draft_wait_ms']:.0f} ms" if b["draft_wait_ms"] is not None else ""
    per_level = f", {b['nodes_per_level']:.1f} a level" if b["nodes_per_level"] is not None else ""
    return f"{'=' if b['pinned'] else '<='} k {b['k']}, depth {b['depth']}{draft_wait}{per_level}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _verifier(v: Document) -> tuple[str, ...]:
    return (
        v["id"],
        v["address"],
        f"{v['target']['name']} {v['target']['dtype']}",
        f"{v['sessions']}/{v['capacity']}",
        f"{v['tokens_per_s']:.0f}",
        ms(v["step_ms"]),
        f"{v['node_ms']:.2f} ms",
        f"{v['min_acceptance']:.2f}",
        share(v["acceptance"]),
        ms(v["rtt_ms"]),
        f"{v['kv_used']}/{v['kv_capacity']}",
        f"{v['lease_s']:.1f} s",
        v["state"],
    )


def _cost(v: Document) -> tuple[str, ...]:
    cost_ms = v["step_cost_ms"]
    return (v["id"], *(ms(cost_ms.get(str(rows))) for rows in _COST_ROWS), f"{v['session_cost_ms']:.2f} ms")


def _session(s: Document) -> tuple[str, ...]:
    return (
        s["id"],
        s["tenant"],
        s["verifier"],
        s["state"],
        str(s["committed"]),
        f"{s['tokens_per_step'] or 0:.2f}",
        share(s["acceptance"]),
        ms(s["rtt_ms"]),
        (s["draft"] or "-")[:SHORT],
        s["traffic_class"] or "-",
    )


def _window(w: Document) -> tuple[str, ...]:
    return (
        w["session"],
        w["verifier"],
        str(w["k"]),
        str(w["depth"]),
        f"{w['nodes_per_level']:.1f}",
        f"{w['draft_wait_ms']:.0f} ms",
        f"{w['min_acceptance']:.2f}",
        f"{w['speedup']:.2f}",
        f"{w['tokens_per_step']:.2f}",
        f"{w['first_acceptance']:.2f} of {w['observations']}",
        ms(w["rtt_ms"]),
        ms(w["draft_ms"]),
        bounds(w["bounds"]) if w["bounds"] else "-",
        w["reason"],
    )
