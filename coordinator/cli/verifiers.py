"""Show a cluster and its verifiers; cordon, uncordon and drain them (`outrider status|top|verifiers`)."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from coordinator.cli import sessions
from coordinator.cli.arguments import TIMEOUT_S
from coordinator.cli.connection import AdminCall, admin_settings
from coordinator.cli.output import (
    Columns,
    Document,
    Result,
    facts,
    fields,
    listing,
    ms,
    pages,
    share,
    show,
    table,
)
from outrider.core.text import clean
from outrider.wire.telemetry import WRONG_CLOCK_S
from outrider.wire.v1 import coordinator_pb2 as pb


def _clock(ahead_s: float) -> str:
    """Return what a table says of a verifier's clock: nothing unless it is wrong."""
    return f", clock {ahead_s:+.0f} s" if abs(ahead_s) > WRONG_CLOCK_S else ""


COLUMNS: Columns = {
    "VERIFIER": lambda v: v["id"],
    "ADDRESS": lambda v: v["address"],
    "TARGET": lambda v: f"{v['target']['name']} {v['target']['dtype']}",
    "SESSIONS": lambda v: f"{v['sessions']}/{v['capacity_sessions']}",
    "TOKENS/S": lambda v: f"{v['tokens_per_s']:.0f}",
    "STEP": lambda v: ms(v["step_ms"]),
    "NODE": lambda v: f"{v['node_ms']:.2f} ms",
    "MIN ACC": lambda v: f"{v['min_acceptance']:.2f}",
    "ACCEPTED": lambda v: share(v["accepted"], v["evaluated"]),
    "RTT": lambda v: ms(v["rtt_ms"]),
    "KV": lambda v: f"{v['kv_used']}/{v['kv_capacity']}",
    "LEASE": lambda v: f"{v['lease_s']:.1f} s",
    "RESTARTS": lambda v: str(v["restarts"]),
    "STATE": lambda v: v["state"] + _clock(v["clock_ahead_s"]),
}
TOP_COLUMNS: Columns = {
    "TOKENS/S": lambda s: "-" if s["tokens_per_s"] is None else f"{s['tokens_per_s']:.0f}",
    **sessions.COLUMNS,
}
TOP_SESSIONS = 20
"""Sessions that `top` shows where there is no terminal to fill."""
_OTHER_LINES = 7
"""Lines of a frame of `top` that are neither verifiers nor sessions."""
_NO_VERIFIER = "no verifier is registered"
_DONE = {
    "cordon": "no new sessions are placed there, under this id, until `outrider verifiers uncordon {id}`",
    "uncordon": "sessions are placed there again",
    "drain": "it drains with its next report, hands over what does not finish in time, and ends; its id stays cordoned"
    " until `outrider verifiers uncordon {id}`",
}


async def status(options: argparse.Namespace, call: AdminCall) -> Result:
    serving, answer = await pages(call, pb.ListVerifiersRequest())
    placed, _ = await pages(call, pb.ListSessionsRequest())
    document = {
        "coordinator": admin_settings(options).coordinator,
        "verifiers": list(map(_document, serving)),
        "sessions": list(map(sessions.document, placed)),
        "store": answer.store,
        "uptime_s": answer.uptime_s,
        "lost_s": dict(answer.lost_s),
        "total_verifiers": len(serving),
        "total_sessions": len(placed),
    }
    return Result(document, _overview(document, sessions.COLUMNS))


class Frames:
    """Makes the frames of `outrider top`, with each session's speed since the frame before."""

    def __init__(self) -> None:
        self._at = 0.0
        self._committed: dict[tuple[str, int], int] = {}
        """Session and epoch, which is another after a session has moved -> tokens."""

    async def next(self, options: argparse.Namespace, call: AdminCall) -> Result:
        found = (await status(options, call)).document
        elapsed_s, known = time.monotonic() - self._at, dict[tuple[str, int], int]()
        for s in found["sessions"]:
            key = s["id"], s["epoch"]
            known[key] = s["committed"]
            s["tokens_per_s"] = (known[key] - self._committed[key]) / elapsed_s if key in self._committed else None
        self._at, self._committed = self._at + elapsed_s, known
        busiest = sorted(found["sessions"], key=lambda s: (-(s["tokens_per_s"] or 0.0), -s["committed"]))
        terminal = shutil.get_terminal_size() if sys.stdout.isatty() else None
        room = max(1, terminal.lines - len(found["verifiers"]) - _OTHER_LINES) if terminal else TOP_SESSIONS
        most = options.sessions or room
        view = _overview({**found, "sessions": busiest[:most]}, TOP_COLUMNS)
        if found["total_sessions"] > most:
            view += f"\nand {found['total_sessions'] - most} more sessions"
        if terminal:
            view = "\n".join(line[: terminal.columns] for line in view.split("\n"))
        return Result(found, view)


def top(options: argparse.Namespace) -> int:
    """Show the cluster again and again, the busiest sessions first, until Ctrl-C. Raises core errors."""
    options.watch = None if options.once else options.interval
    options.output, options.timeout_s = "table", TIMEOUT_S
    return show(Frames().next, options)


async def list_verifiers(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.ListVerifiersRequest(after=options.after)
    return await listing(call, request, options.limit, _document, COLUMNS, _NO_VERIFIER)


async def show_verifier(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListVerifiers", pb.ListVerifiersRequest(verifier_id=options.verifier))
    document = _document(answer.verifiers[0])
    return Result(document, facts(document))


async def update(options: argparse.Namespace, call: AdminCall) -> Result:
    """Cordon, uncordon or drain a verifier."""
    action = f"VERIFIER_ACTION_{options.verb.upper()}"
    answer = await call("UpdateVerifier", pb.UpdateVerifierRequest(verifier_id=options.verifier, action=action))
    known = _document(answer.verifier) if answer.HasField("verifier") else None
    notice = ""
    if options.verb == "uncordon" and known and known["draining"]:
        notice = "it is draining already, which cannot be taken back; what is started under its id next gets sessions"
    document = {"id": options.verifier, "action": options.verb, "verifier": known}
    return Result(document, f"{options.verifier}: {_DONE[options.verb].format(id=options.verifier)}", notice)


def _overview(document: Document, session_columns: Columns) -> str:
    """Return the head and the tables of a document of `status`."""
    head = f"coordinator {document['coordinator']}, up {document['uptime_s']:.0f} s, store {clean(document['store'])}"
    for name, seconds in sorted(document["lost_s"].items()):
        head += f"\n{name} is lost: it did not leave in order, and its lease ended {seconds:.0f} s ago"
    verifiers = table(COLUMNS, document["verifiers"], _NO_VERIFIER)
    return f"{head}\n\n{verifiers}\n\n{table(session_columns, document['sessions'], sessions.NO_SESSIONS)}"


def _document(v: pb.VerifierStatus) -> Document:
    state = "draining" if v.telemetry.draining else "cordoned" if v.cordoned else "serving"
    known = {"id": v.verifier_id, "state": state, **fields(v, "verifier_id", "telemetry"), **fields(v.telemetry)}
    return {**known, "sessions": known.pop("live_sessions")}
