"""`outrider status`: show the verifiers and sessions of a cluster."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views, sessions, verifiers
from coordinator.cli.connection import AdminCall, settings_of
from coordinator.cli.json_views import Document
from coordinator.cli.output import Result, query
from coordinator.cli.tables import stacked, table
from outrider.wire.v1 import coordinator_pb2 as pb


@query()
async def status(options: argparse.Namespace, call: AdminCall) -> Result:
    coordinator = settings_of(options).coordinator
    known = json_views.status(coordinator, await call("Status", pb.StatusRequest()))
    head = f"coordinator {coordinator}, up {known['uptime_s']:.0f} s, store {known['store']}"
    return Result(
        known,
        lambda: stacked(
            head,
            table(verifiers.COLUMNS, known["verifiers"]),
            table(verifiers.STEP_COSTS, known["verifiers"]),
            table(sessions.COLUMNS, known["sessions"]),
        ),
        _left_out(known),
    )


def _left_out(known: Document) -> str:
    """Return the notice of a cut list. A session that moves to another verifier counts twice, so few may be missing."""
    parts = [(what, len(known[what]), known[f"total_{what}"]) for what in ("verifiers", "sessions")]
    return "; ".join(
        f"{shown} of {total} {what} are shown, `outrider {what} list` shows all"
        for what, shown, total in parts
        if shown < total
    )
