"""`outrider window`: show how far sessions speculate and why, bound it or pin it."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views
from coordinator.cli.connection import AdminCall
from coordinator.cli.json_views import Document
from coordinator.cli.output import Result, query
from coordinator.cli.tables import Column, ms, number, stacked, table
from outrider.core.errors import NotFound
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS = (
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
    Column("BOUNDS", lambda w: bounds_text(w["bounds"]) if w["bounds"] else "-"),
    Column("REASON", lambda w: w["reason"]),
)
_UNDECIDED = "nothing has been decided, for too little is known of any such session yet"


@query()
async def show_windows(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListWindows", pb.ListWindowsRequest(session_id=options.session))
    if options.session and not answer.windows:
        raise NotFound(f"{_UNDECIDED}: {options.session}; `outrider sessions list` shows which there are")
    everybody = json_views.bounds(answer.default_bounds) if answer.HasField("default_bounds") else None
    found = list(map(json_views.window, answer.windows))
    head = f"bounds for all: {bounds_text(everybody) if everybody else 'none'}"
    notice = ""
    if len(found) < answer.total:
        notice = f"{len(found)} of {answer.total} decisions are shown; name a session to see its own"
    document = {"everybody": everybody, "windows": found, "total": answer.total}
    return Result(document, lambda: stacked(head, table(COLUMNS, found) if found else _UNDECIDED), notice)


@query()
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
        lambda: f"{whose}: {bounds_text(known) if known else 'left to the measurements'}",
    )


def bounds_text(b: Document) -> str:
    """Return the bounds of a window in words."""
    draft_wait = f", {b['draft_wait_ms']:.0f} ms" if b["draft_wait_ms"] is not None else ""
    per_level = f", {b['nodes_per_level']:.1f} a level" if b["nodes_per_level"] is not None else ""
    return f"{'=' if b['pinned'] else '<='} k {b['k']}, depth {b['depth']}{draft_wait}{per_level}"
