"""`outrider sessions`: list and show live sessions, and end one."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views
from coordinator.cli.connection import AdminCall
from coordinator.cli.json_views import Document
from coordinator.cli.output import Result, listing, query
from coordinator.cli.tables import SHORT, Column, facts, ms, number, share
from coordinator.cli.window import bounds_text
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


@query()
async def list_sessions(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.ListSessionsRequest(verifier_id=options.verifier, tenant=options.tenant, after=options.after)
    none = "no session holds a place"
    found, _ = await listing(call, "ListSessions", request, options.limit, json_views.session, COLUMNS, none)
    return found


@query()
async def show_session(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListSessions", pb.ListSessionsRequest(session_id=options.session))
    known = json_views.session(answer.sessions[0])
    decided = (await call("ListWindows", pb.ListWindowsRequest(session_id=options.session))).windows
    known["window"] = json_views.window(decided[0]) if decided else None
    return Result(known, lambda: facts(_facts(known)))


@query()
async def kill(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("KillSession", pb.KillSessionRequest(session_id=options.session))
    document = {"id": options.session, "verifier": answer.verifier_id, "killed": True}
    return Result(
        document, lambda: f"{options.session}: killed; verifier {answer.verifier_id} ends it with its next report"
    )


def _facts(s: Document) -> dict[str, str]:
    return {
        "session": s["id"],
        "state": "live" if s["state"] == "live" else "placed, and its device has not attached yet",
        "tenant": s["tenant"],
        "verifier": f"{s['verifier']}, standby {s['standby'] or 'none'}",
        "epoch": str(s["epoch"]),
        "committed": f"{s['committed']} tokens, {s['tokens_per_step'] or 0:.2f} a step",
        "accepted": f"{share(s['acceptance'])}, {s['accepted']} of {s['evaluated']} nodes",
        "round trip": ms(s["rtt_ms"]),
        "draft": s["draft"] or "none that the coordinator knows of",
        "traffic class": s["traffic_class"] or "none",
        "window": _window(s["window"]) if s["window"] else "not decided yet: its verifier's own",
    }


def _window(w: Document) -> str:
    bounds = f"; bounds {bounds_text(w['bounds'])}" if w["bounds"] else ""
    return f"k {w['k']}, depth {w['depth']}, predicted at {w['speedup']:.2f} of streaming: {w['reason']}{bounds}"
