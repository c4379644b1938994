"""Show a cluster and its verifiers; cordon, uncordon and drain them (`outrider status`, `outrider verifiers`)."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views, sessions
from coordinator.cli.connection import AdminCall, admin_settings
from coordinator.cli.json_views import Document
from coordinator.cli.output import Column, Result, facts, listing, ms, number, share, stacked, table
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS = (
    Column("VERIFIER", lambda v: v["id"]),
    Column("ADDRESS", lambda v: v["address"]),
    Column("TARGET", lambda v: f"{v['target']['name']} {v['target']['dtype']}"),
    number("SESSIONS", lambda v: f"{v['sessions']}/{v['capacity']}"),
    number("TOKENS/S", lambda v: f"{v['tokens_per_s']:.0f}"),
    number("STEP", lambda v: ms(v["step_ms"])),
    number("NODE", lambda v: f"{v['node_ms']:.2f} ms"),
    number("MIN ACC", lambda v: f"{v['min_acceptance']:.2f}"),
    number("ACCEPTED", lambda v: share(v["acceptance"])),
    number("RTT", lambda v: ms(v["rtt_ms"])),
    number("KV", lambda v: f"{v['kv_used']}/{v['kv_capacity']}"),
    number("LEASE", lambda v: f"{v['lease_s']:.1f} s"),
    Column("STATE", lambda v: v["state"]),
)


_NO_VERIFIER = "no verifier is registered"
_DONE = {
    "cordon": "no new sessions are placed there, under this id, until `outrider verifiers uncordon {id}`",
    "uncordon": "sessions are placed there again",
    "drain": "it drains with its next report, hands over what does not finish in time, and ends; its id stays cordoned"
    " until `outrider verifiers uncordon {id}`",
}


async def status(options: argparse.Namespace, call: AdminCall) -> Result:
    coordinator = admin_settings(options).coordinator
    known = json_views.status(coordinator, await call("Status", pb.StatusRequest()))
    head = f"coordinator {coordinator}, up {known['uptime_s']:.0f} s, store {known['store']}"
    # A session that moves to another verifier counts twice, so few may be missing.
    parts = [(what, len(known[what]), known[f"total_{what}"]) for what in ("verifiers", "sessions")]
    left_out = [
        f"{shown} of {total} {what} are shown, `outrider {what} list` shows all"
        for what, shown, total in parts
        if shown < total
    ]
    verifiers = known["verifiers"]
    return Result(
        known,
        lambda: stacked(
            head,
            table(COLUMNS, verifiers) if verifiers else _NO_VERIFIER,
            table(sessions.COLUMNS, known["sessions"]) if known["sessions"] else sessions.NO_SESSIONS,
        ),
        "; ".join(left_out),
    )


async def list_verifiers(options: argparse.Namespace, call: AdminCall) -> Result:
    request, none = pb.ListVerifiersRequest(after=options.after), _NO_VERIFIER
    found, _ = await listing(call, "ListVerifiers", request, options.limit, json_views.verifier, COLUMNS, none)
    return found


async def show_verifier(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListVerifiers", pb.ListVerifiersRequest(verifier_id=options.verifier))
    known = json_views.verifier(answer.verifiers[0])
    return Result(known, lambda: facts(_facts(known)))


async def update(options: argparse.Namespace, call: AdminCall) -> Result:
    """Cordon, uncordon or drain a verifier."""
    action = f"VERIFIER_ACTION_{options.verb.upper()}"
    answer = await call("UpdateVerifier", pb.UpdateVerifierRequest(verifier_id=options.verifier, action=action))
    known = json_views.verifier(answer.verifier) if answer.HasField("verifier") else None
    notice = ""
    if options.verb == "uncordon" and known and known["draining"]:
        notice = "it is draining already, which cannot be taken back; what is started under its id next gets sessions"
    document = {"id": options.verifier, "action": options.verb, "verifier": known}
    return Result(document, lambda: f"{options.verifier}: {_DONE[options.verb].format(id=options.verifier)}", notice)


def _facts(v: Document) -> dict[str, str]:
    target = v["target"]
    return {
        "verifier": v["id"],
        "address": v["address"],
        "state": v["state"] + (", cordoned" if v["draining"] and v["cordoned"] else ""),
        "lease": f"{v['lease_s']:.1f} s left",
        "target": f"{target['name']}, {target['dtype']}, {target['backend']} on {target['hardware']}",
        "weights": target["weights"],
        "tokenizer": target["tokenizer"],
        "sessions": f"{v['sessions']} of {v['capacity']}",
        "tokens/s": f"{v['tokens_per_s']:.1f}",
        "min_acceptance": f"{v['min_acceptance']:.3f}",
        "accepted": f"{share(v['acceptance'])}, {v['accepted']} of {v['evaluated']} nodes of live sessions",
        "round trip": f"{ms(v['rtt_ms'])}, the median of its sessions",
        "KV slots": f"{v['kv_used']} of {v['kv_capacity']}",
        "step": f"{v['step_ms']:.1f} ms, and {v['node_ms']:.2f} ms for a node",
        "step parts": _each(v["step_parts_ms"], "{name} {ms:.1f} ms"),
        "cost by rows": _each(v["step_cost_ms"], "{name}: {ms:.1f} ms"),
        "session cost": f"{v['session_cost_ms']:.2f} ms a step",
    }


def _each(times_ms: dict[str, float], form: str) -> str:
    return ", ".join(form.format(name=name, ms=ms) for name, ms in times_ms.items()) or "not measured yet"
