"""`outrider window`: how far sessions speculate."""

from __future__ import annotations

import argparse
from typing import Any

from coordinator.cli import json_views, table_columns
from coordinator.cli.connection import Ask
from coordinator.cli.output import Shown, output_options, show
from coordinator.cli.values import levels, milliseconds, per_level
from outrider.core.errors import NotFound
from outrider.wire.v1 import coordinator_pb2 as pb

_UNDECIDED = "nothing has been decided, for too little is known of any such session yet"


def add_parser(commands: Any) -> None:
    window = commands.add_parser("window", help="how far sessions speculate: see why, pin it or bound it")
    verbs = window.add_subparsers(required=True, metavar="VERB", dest="verb")
    shown = verbs.add_parser("show", help="what was decided, from what, and why")
    shown.add_argument("session", nargs="?", default="", metavar="SESSION", help="its id [default: all]")
    output_options(shown, watch=True)
    shown.set_defaults(run=lambda options: show(options, lambda ask: _show(options, ask)))
    bound = verbs.add_parser("set", help="allow no more than this")
    pin = verbs.add_parser("pin", help="this and nothing else, whatever the measurements say")
    lift = verbs.add_parser("lift", help="leave it to the measurements again")
    for verb in (bound, pin, lift):
        which = verb.add_mutually_exclusive_group(required=True)
        which.add_argument("session", nargs="?", default="", metavar="SESSION", help="its id")
        which.add_argument("--all", action="store_true", help="every session without bounds of its own")
        output_options(verb)
        verb.set_defaults(run=lambda options: show(options, lambda ask: _bound(options, ask)))
    for verb in (bound, pin):
        verb.add_argument(
            "--k",
            type=levels,
            metavar="N",
            required=True,
            help="levels that one step verifies, each a guess and its siblings; 0 is plain streaming",
        )
        verb.add_argument(
            "--depth", type=levels, metavar="N", required=True, help="levels that the device drafts ahead; at least k"
        )
    pin.add_argument(
        "--draft-wait-ms",
        type=milliseconds,
        metavar="MS",
        help="how long a step waits for nodes [default: as decided]",
    )
    pin.add_argument(
        "--per-level", type=per_level, metavar="X", help="nodes of a level, its siblings counted [default: as seen]"
    )


async def _show(options: argparse.Namespace, ask: Ask) -> Shown:
    answer = await ask("ShowWindows", pb.ShowWindowsRequest(session_id=options.session))
    if options.session and not answer.windows:
        raise NotFound(f"{_UNDECIDED}: {options.session}; `outrider sessions list` shows which there are")
    everybody = json_views.bounds(answer.everybody) if answer.HasField("everybody") else None
    found = list(map(json_views.window, answer.windows))
    head = f"bounds for all: {table_columns.bounds(everybody) if everybody else 'none'}"
    text = f"{head}\n\n{table_columns.windows(found) if found else _UNDECIDED}"
    notice = ""
    if len(found) < answer.total:
        notice = f"{len(found)} of {answer.total} decisions are shown; name a session to see its own"
    return Shown({"everybody": everybody, "windows": found, "total": answer.total}, text, notice)


async def _bound(options: argparse.Namespace, ask: Ask) -> Shown:
    bounds = None
    if options.verb != "lift":
        window = pb.Window(k=options.k, depth=options.depth)
        if options.verb == "pin":
            window.MergeFrom(pb.Window(draft_wait_ms=options.draft_wait_ms, nodes_per_level=options.per_level))
        bounds = pb.WindowBounds(window=window, pinned=options.verb == "pin")
    await ask("BoundWindow", pb.BoundWindowRequest(session_id=options.session, bounds=bounds))
    known = json_views.bounds(bounds) if bounds is not None else None
    whose = options.session or "all sessions without bounds of their own"
    text = f"{whose}: {table_columns.bounds(known) if known else 'left to the measurements'}"
    return Shown({"session": options.session or None, "bounds": known}, text)
