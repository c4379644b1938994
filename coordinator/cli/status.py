"""`outrider status`: everything at a glance."""

from __future__ import annotations

import argparse
from typing import Any

from coordinator.cli import json_views, table_columns
from coordinator.cli.connection import Ask, link_of
from coordinator.cli.output import Shown, output_options, show
from outrider.core.text import clean
from outrider.wire.v1 import coordinator_pb2 as pb


def add_parser(commands: Any) -> None:
    status = commands.add_parser("status", help="verifiers and sessions of a running cluster")
    output_options(status, watch=True)
    status.set_defaults(run=lambda options: show(options, lambda ask: _status(options, ask)))


async def _status(options: argparse.Namespace, ask: Ask) -> Shown:
    coordinator = link_of(options).coordinator
    known = json_views.status(coordinator, await ask("Status", pb.StatusRequest()))
    head = f"coordinator {coordinator}, up {known['uptime_s']:.0f} s, store {known['store']}"
    verifiers, sessions = known["verifiers"], known["sessions"]
    tables = (table_columns.verifiers(verifiers), table_columns.costs(verifiers), table_columns.sessions(sessions))
    return Shown(known, "\n\n".join((clean(head), *tables)), _left_out(known))


def _left_out(known: json_views.Document) -> str:
    """Sessions that are on their way from one verifier to another are counted, too, so a few may be missing."""
    verifiers, sessions = len(known["verifiers"]), len(known["sessions"])
    cut = [
        f"{shown} of {total} {what} are shown, `outrider {what} list` shows all"
        for what, shown, total in (
            ("verifiers", verifiers, known["total_verifiers"]),
            ("sessions", sessions, known["total_sessions"]),
        )
        if shown < total
    ]
    return "; ".join(cut)
