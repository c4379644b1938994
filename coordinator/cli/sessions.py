"""List, show and end live sessions, and bound how far they speculate (`outrider sessions`, `outrider window`)."""

from __future__ import annotations

import argparse

from coordinator.cli.connection import AdminCall
from coordinator.cli.output import (
    SHORT,
    Columns,
    Document,
    Result,
    facts,
    fields,
    listing,
    ms,
    pages,
    share,
    table,
)
from outrider.core.errors import NotFound
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS: Columns = {
    "SESSION": lambda s: s["id"],
    "TENANT": lambda s: s["tenant"],
    "VERIFIER": lambda s: s["verifier"],
    "STATE": lambda s: s["state"],
    "COMMITTED": lambda s: str(s["committed"]),
    "TOKENS/STEP": lambda s: f"{s['committed'] / s['steps']:.2f}" if s["steps"] else "-",
    "ACCEPTED": lambda s: share(s["accepted"], s["evaluated"]),
    "RTT": lambda s: ms(s["rtt_ms"]),
    "DRAFT": lambda s: s["draft_release"][:SHORT] or "-",
    "CLASS": lambda s: s["traffic_class"] or "-",
}
WINDOW_COLUMNS: Columns = {
    "SESSION": lambda w: w["session_id"],
    "VERIFIER": lambda w: w["verifier_id"],
    "K": lambda w: str(w["window"]["k"]),
    "DEPTH": lambda w: str(w["window"]["depth"]),
    "PER LEVEL": lambda w: f"{w['window']['nodes_per_level']:.1f}",
    "DRAFT WAIT": lambda w: f"{w['window']['draft_wait_ms']:.0f} ms",
    "MIN ACC": lambda w: f"{w['min_acceptance']:.2f}",
    "SPEED-UP": lambda w: f"{w['speedup']:.2f}",
    "TOKENS/STEP": lambda w: f"{w['tokens_per_step']:.2f}",
    "FIRST ACC": lambda w: f"{w['first_acceptance']:.2f} of {w['observations']}",
    "RTT": lambda w: ms(w["rtt_ms"]),
    "DRAFT": lambda w: ms(w["draft_ms"]),
    "BOUNDS": lambda w: _bounds(w["bounds"]) if "bounds" in w else "-",
    "REASON": lambda w: w["reason"],
}
NO_SESSIONS = "no sessions"
_UNDECIDED = "no window is decided, since too little is known of such a session yet"


async def list_sessions(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.ListSessionsRequest(verifier_id=options.verifier, tenant=options.tenant, after=options.after)
    return await listing(call, request, options.limit, document, COLUMNS, "no session holds a place")


async def show_session(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListSessions", pb.ListSessionsRequest(session_id=options.session))
    [found] = answer.sessions
    known = {**document(found), "window": fields(found.window) if found.HasField("window") else None}
    return Result(known, facts(known))


async def kill(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.UpdateSessionRequest(session_id=options.session, action="SESSION_ACTION_KILL")
    answer = await call("UpdateSession", request)
    killed = {"id": options.session, "verifier": answer.verifier_id, "killed": True}
    return Result(killed, f"{options.session}: killed; verifier {answer.verifier_id} ends it with its next report")


async def show_windows(options: argparse.Namespace, call: AdminCall) -> Result:
    listed, answer = await pages(call, pb.ListSessionsRequest(session_id=options.session))
    windows = [fields(s.window) for s in listed if s.HasField("window")]
    if options.session and not windows:
        raise NotFound(f"{_UNDECIDED}: {options.session}; `outrider sessions list` shows which there are")
    bounds = {"default_bounds": fields(answer.default_bounds)} if answer.HasField("default_bounds") else {}
    found = {"windows": windows, **bounds, "total": len(listed)}
    head = f"bounds for all: {_bounds(bounds['default_bounds']) if bounds else 'none'}"
    none = _UNDECIDED if listed else NO_SESSIONS
    return Result(found, f"{head}\n\n{table(WINDOW_COLUMNS, windows, none)}")


async def bound(options: argparse.Namespace, call: AdminCall) -> Result:
    """Bound or pin the window of a session or of all, or remove that."""
    bounds = None
    if options.verb != "lift":
        window = pb.Window(k=options.k, depth=options.depth)
        if options.verb == "pin":
            window.MergeFrom(pb.Window(draft_wait_ms=options.draft_wait_ms, nodes_per_level=options.per_level))
        bounds = pb.WindowBounds(window=window, pinned=options.verb == "pin")
    request = pb.UpdateSessionRequest(session_id=options.session, action="SESSION_ACTION_BOUND", bounds=bounds)
    await call("UpdateSession", request)
    known = fields(bounds) if bounds is not None else None
    whose = options.session or "all sessions without bounds of their own"
    view = f"{whose}: {_bounds(known) if known else 'left to the measurements'}"
    return Result({"session": options.session or None, "bounds": known}, view)


def document(s: pb.SessionStatus) -> Document:
    return {
        "id": s.telemetry.session_id,
        "verifier": s.verifier_id,
        "standby": s.standby,
        "state": "live" if s.reported else "placed",
        **fields(s.telemetry, "session_id", "acceptance_history"),
    }


def _bounds(b: Document) -> str:
    """Return the bounds of a window in words."""
    w = b["window"]
    draft_wait = f", {w['draft_wait_ms']:.0f} ms" if "draft_wait_ms" in w else ""
    per_level = f", {w['nodes_per_level']:.1f} a level" if "nodes_per_level" in w else ""
    return f"{'=' if b['pinned'] else '<='} k {w['k']}, depth {w['depth']}{draft_wait}{per_level}"
