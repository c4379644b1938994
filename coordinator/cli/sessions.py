"""List, show and end live sessions, and bound how far they speculate (`outrider sessions`, `outrider window`)."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views
from coordinator.cli.connection import AdminCall
from coordinator.cli.json_views import Document
from coordinator.cli.output import SHORT, Column, Result, facts, listing, ms, number, share, stacked, table
from outrider.core.errors import NotFound
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS = (
    Column("SESSION", lambda s: s["id"]),
    Column("TENANT", lambda s: s["tenant"]),
    Column("VERIFIER", lambda s: s["verifier"]),
    Column("STATE", lambda s: s["state"]),
    number("COMMITTED", lambda s: str(s["committed"])),
    number("TOKENS/STEP", lambda s: f"{s['tokens_per_step'] or 0:.2f}"),
    number("ACCEPTED", lambda s: share(s["acceptance"])),
    number("RTT", lambda s: ms(s["rtt_ms"])),
    Column("DRAFT", lambda s: (s["draft"] or "-")[:SHORT]),
    Column("CLASS", lambda s: s["traffic_class"] or "-"),
)
WINDOW_COLUMNS = (
    Column("SESSION", lambda w: w["session"]),
    Column("VERIFIER", lambda w: w["verifier"]),
    number("K", lambda w: str(w["k"])),
    number("DEPTH", lambda w: str(w["depth"])),
    number("PER LEVEL", lambda w: f"{w['nodes_per_level']:.1f}"),
    number("DRAFT WAIT", lambda w: f"{w['draft_wait_ms']:.0f} ms"),
    number("MIN ACC", lambda w: f"{w['min_acceptance']:.2f}"),
    number("SPEED-UP", lambda w: f"{w['speedup']:.2f}"),
    number("TOKENS/STEP", lambda w: f"{w['tokens_per_step']:.2f}"),
    number("FIRST ACC", lambda w: f"{w['first_acceptance']:.2f} of {w['observations']}"),
    number("RTT", lambda w: ms(w["rtt_ms"])),
    number("DRAFT", lambda w: ms(w["draft_ms"])),
    Column("BOUNDS", lambda w: _bounds(w["bounds"]) if w["bounds"] else "-"),
    Column("REASON", lambda w: w["reason"]),
)
NO_SESSIONS = "no sessions"
_UNDECIDED = "no window is decided, since too little is known of such a session yet"


async def list_sessions(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.ListSessionsRequest(verifier_id=options.verifier, tenant=options.tenant, after=options.after)
    none = "no session holds a place"
    found, _ = await listing(call, "ListSessions", request, options.limit, json_views.session, COLUMNS, none)
    return found


async def show_session(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListSessions", pb.ListSessionsRequest(session_id=options.session))
    known = json_views.session(answer.sessions[0])
    decided = (await call("ListWindows", pb.ListWindowsRequest(session_id=options.session))).windows
    known["window"] = json_views.window(decided[0]) if decided else None
    return Result(known, lambda: facts(_facts(known)))


async def kill(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("KillSession", pb.KillSessionRequest(session_id=options.session))
    document = {"id": options.session, "verifier": answer.verifier_id, "killed": True}
    return Result(
        document, lambda: f"{options.session}: killed; verifier {answer.verifier_id} ends it with its next report"
    )


async def show_windows(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListWindows", pb.ListWindowsRequest(session_id=options.session))
    if options.session and not answer.windows:
        raise NotFound(f"{_UNDECIDED}: {options.session}; `outrider sessions list` shows which there are")
    default_bounds = json_views.bounds(answer.default_bounds) if answer.HasField("default_bounds") else None
    found = list(map(json_views.window, answer.windows))
    head = f"bounds for all: {_bounds(default_bounds) if default_bounds else 'none'}"
    none = _UNDECIDED
    if not found and not (await call("ListSessions", pb.ListSessionsRequest(limit=1))).sessions:
        none = NO_SESSIONS
    notice = ""
    if len(found) < answer.total:
        notice = f"{len(found)} of {answer.total} decisions are shown; name a session to see its own"
    document = {"default_bounds": default_bounds, "windows": found, "total": answer.total}
    return Result(document, lambda: stacked(head, table(WINDOW_COLUMNS, found) if found else none), notice)


async def bound(options: argparse.Namespace, call: AdminCall) -> Result:
    """Bound or pin the window of a session or of all, or remove that."""
    bounds = None
    if options.verb != "lift":
        window = pb.Window(k=options.k, depth=options.depth)
        if options.verb == "pin":
            window.MergeFrom(pb.Window(draft_wait_ms=options.draft_wait_ms, nodes_per_level=options.per_level))
        bounds = pb.WindowBounds(window=window, pinned=options.verb == "pin")
    await call("SetWindowBounds", pb.SetWindowBoundsRequest(session_id=options.session, bounds=bounds))
    known = json_views.bounds(bounds) if bounds is not None else None
    whose = options.session or "all sessions without bounds of their own"
    return Result(
        {"session": options.session or None, "bounds": known},
        lambda: f"{whose}: {_bounds(known) if known else 'left to the measurements'}",
    )


def _facts(s: Document) -> dict[str, str]:
    lossy = ", by a lossy rule" if s["lossy"] else ""
    return {
        "session": s["id"],
        "state": "live" if s["state"] == "live" else "placed, and its device has not attached yet",
        "tenant": s["tenant"],
        "verifier": f"{s['verifier']}, standby {s['standby'] or 'none'}",
        "epoch": str(s["epoch"]),
        "committed": f"{s['committed']} tokens, {s['tokens_per_step'] or 0:.2f} a step",
        "accepted": f"{share(s['acceptance'])}, {s['accepted']} of {s['evaluated']} nodes" + lossy,
        "round trip": ms(s["rtt_ms"]),
        "draft": s["draft"] or "none that the coordinator knows of",
        "traffic class": s["traffic_class"] or "none",
        "window": _window(s["window"]) if s["window"] else "not decided yet: its verifier's own",
    }


def _window(w: Document) -> str:
    bounds = f"; bounds {_bounds(w['bounds'])}" if w["bounds"] else ""
    return f"k {w['k']}, depth {w['depth']}, predicted at {w['speedup']:.2f} of streaming: {w['reason']}{bounds}"


def _bounds(b: Document) -> str:
    """Return the bounds of a window in words."""
    draft_wait = f", {b['draft_wait_ms']:.0f} ms" if b["draft_wait_ms"] is not None else ""
    per_level = f", {b['nodes_per_level']:.1f} a level" if b["nodes_per_level"] is not None else ""
    return f"{'=' if b['pinned'] else '<='} k {b['k']}, depth {b['depth']}{draft_wait}{per_level}"
