"""`outrider verifiers`: see them, keep new sessions off them, have them drain."""

from __future__ import annotations

import argparse
from typing import Any

from coordinator.cli import json_views, table_columns
from coordinator.cli.connection import Ask
from coordinator.cli.output import Shown, cut, output_options, page_options, pages, show
from outrider.core.text import facts
from outrider.wire.v1 import coordinator_pb2 as pb

_ORDERS = {
    "cordon": pb.VERIFIER_ORDER_CORDON,
    "uncordon": pb.VERIFIER_ORDER_UNCORDON,
    "drain": pb.VERIFIER_ORDER_DRAIN,
}
_HELP = {
    "cordon": "place no new sessions there; what runs goes on",
    "uncordon": "place sessions there again",
    "drain": "cordon, let its sessions finish or move to others, and end its process",
}
_DONE = {
    "cordon": "no new sessions are placed there, under this id, until `outrider verifiers uncordon {id}`",
    "uncordon": "sessions are placed there again",
    "drain": "it drains with its next report, hands over what does not finish in time, and ends; its id stays cordoned"
    " until `outrider verifiers uncordon {id}`",
}


def add_parser(commands: Any) -> None:
    verifiers = commands.add_parser("verifiers", help="list them, show one, cordon, uncordon, drain")
    verbs = verifiers.add_subparsers(required=True, metavar="VERB", dest="verb")
    listed = verbs.add_parser("list", help="all, by id")
    page_options(listed)
    output_options(listed, watch=True)
    listed.set_defaults(run=lambda options: show(options, lambda ask: _list(options, ask)))
    shown = verbs.add_parser("show", help="all that is known of one")
    shown.add_argument("verifier", metavar="VERIFIER", help="its id")
    output_options(shown, watch=True)
    shown.set_defaults(run=lambda options: show(options, lambda ask: _show(options, ask)))
    for order, what in _HELP.items():
        verb = verbs.add_parser(order, help=what)
        verb.add_argument("verifier", metavar="VERIFIER", help="its id")
        output_options(verb)
        verb.set_defaults(run=lambda options: show(options, lambda ask: _steer(options, ask)))


async def _list(options: argparse.Namespace, ask: Ask) -> Shown:
    request = pb.ListVerifiersRequest(after=options.after)
    found, following = await pages(ask, "ListVerifiers", request, "verifiers", options.limit)
    listed = list(map(json_views.verifier, found))
    text = table_columns.verifiers(listed) if listed else "no verifier is registered"
    document = {"verifiers": listed, "next": following or None}
    return Shown(document, text, cut("verifiers", len(listed), following))


async def _show(options: argparse.Namespace, ask: Ask) -> Shown:
    answer = await ask("ListVerifiers", pb.ListVerifiersRequest(verifier_id=options.verifier))
    known = json_views.verifier(answer.verifiers[0])
    return Shown(known, _facts(known))


async def _steer(options: argparse.Namespace, ask: Ask) -> Shown:
    request = pb.SteerVerifierRequest(verifier_id=options.verifier, order=_ORDERS[options.verb])
    answer = await ask("SteerVerifier", request)
    known = json_views.verifier(answer.verifier) if answer.HasField("verifier") else None
    notice = ""
    if options.verb == "uncordon" and known and known["draining"]:
        notice = "it is draining already, which cannot be taken back; what is started under its id next gets sessions"
    document = {"id": options.verifier, "order": options.verb, "verifier": known}
    return Shown(document, f"{options.verifier}: {_DONE[options.verb].format(id=options.verifier)}", notice)


def _facts(v: json_views.Document) -> str:
    target = v["target"]
    return facts(
        {
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
            "accepted": (
                f"{table_columns.share(v['acceptance'])}, {v['accepted']} of {v['evaluated']} nodes of live sessions"
            ),
            "round trip": f"{table_columns.ms(v['rtt_ms'])}, the median of its sessions",
            "KV": f"{v['kv_used']} of {v['kv_capacity']} slots",
            "step": f"{v['step_ms']:.1f} ms, and {v['node_ms']:.2f} ms for a node",
            "parts of it": _each(v["step_parts_ms"], "{name} {ms:.1f} ms"),
            "rows cost": _each(v["step_cost_ms"], "{name}: {ms:.1f} ms"),
            "session costs": f"{v['session_cost_ms']:.2f} ms a step",
        }
    )


def _each(times_ms: dict[str, float], form: str) -> str:
    return ", ".join(form.format(name=name, ms=ms) for name, ms in times_ms.items()) or "not measured yet"
