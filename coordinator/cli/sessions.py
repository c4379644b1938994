"""`outrider sessions`: see them, and end one."""

from __future__ import annotations

import argparse
from typing import Any

from coordinator.cli import json_views, table_columns
from coordinator.cli.connection import Ask
from coordinator.cli.output import Shown, cut, output_options, page_options, pages, show
from outrider.core.text import facts
from outrider.wire.v1 import coordinator_pb2 as pb


def add_parser(commands: Any) -> None:
    sessions = commands.add_parser("sessions", help="list them, show one, kill one")
    verbs = sessions.add_subparsers(required=True, metavar="VERB", dest="verb")
    listed = verbs.add_parser("list", help="those that hold a place, by verifier and id")
    listed.add_argument("--verifier", default="", metavar="VERIFIER", help="those on this one [default: all]")
    listed.add_argument("--tenant", default="", metavar="TENANT", help="those of this one [default: all]")
    page_options(listed)
    output_options(listed, watch=True)
    listed.set_defaults(run=lambda options: show(options, lambda ask: _list(options, ask)))
    shown = verbs.add_parser("show", help="all that is known of one, and how far it speculates")
    killed = verbs.add_parser("kill", help="end one for good: its device gets a final error, its place is free")
    for verb in (shown, killed):
        verb.add_argument("session", metavar="SESSION", help="its id")
    output_options(shown, watch=True)
    output_options(killed)
    shown.set_defaults(run=lambda options: show(options, lambda ask: _show(options, ask)))
    killed.set_defaults(run=lambda options: show(options, lambda ask: _kill(options, ask)))


async def _list(options: argparse.Namespace, ask: Ask) -> Shown:
    request = pb.ListSessionsRequest(verifier_id=options.verifier, tenant=options.tenant, after=options.after)
    found, following = await pages(ask, "ListSessions", request, "sessions", options.limit)
    listed = list(map(json_views.session, found))
    text = table_columns.sessions(listed) if listed else "no session holds a place"
    document = {"sessions": listed, "next": following or None}
    return Shown(document, text, cut("sessions", len(listed), following))


async def _show(options: argparse.Namespace, ask: Ask) -> Shown:
    answer = await ask("ListSessions", pb.ListSessionsRequest(session_id=options.session))
    known = json_views.session(answer.sessions[0])
    decided = (await ask("ShowWindows", pb.ShowWindowsRequest(session_id=options.session))).windows
    known["window"] = json_views.window(decided[0]) if decided else None
    return Shown(known, _facts(known))


async def _kill(options: argparse.Namespace, ask: Ask) -> Shown:
    answer = await ask("KillSession", pb.KillSessionRequest(session_id=options.session))
    document = {"id": options.session, "verifier": answer.verifier_id, "killed": True}
    told = f"{options.session}: killed; verifier {answer.verifier_id} ends it with its next report"
    return Shown(document, told)


def _facts(s: json_views.Document) -> str:
    window = s["window"]
    return facts(
        {
            "session": s["id"],
            "state": "live" if s["state"] == "live" else "placed, and its device has not attached yet",
            "tenant": s["tenant"],
            "verifier": f"{s['verifier']}, standby {s['standby'] or 'none'}",
            "epoch": str(s["epoch"]),
            "committed": f"{s['committed']} tokens, {s['tokens_per_step'] or 0:.2f} a step",
            "accepted": f"{table_columns.share(s['acceptance'])}, {s['accepted']} of {s['evaluated']} nodes",
            "round trip": table_columns.ms(s["rtt_ms"]),
            "draft": s["draft"] or "none that the coordinator knows of",
            "traffic class": s["traffic_class"] or "none",
            "window": _window(window) if window else "not decided yet: its verifier's own",
        }
    )


def _window(w: json_views.Document) -> str:
    bounds = f"; bounds {table_columns.bounds(w['bounds'])}" if w["bounds"] else ""
    return f"k {w['k']}, depth {w['depth']}, predicted at {w['speedup']:.2f} of streaming: {w['reason']}{bounds}"
