"""`outrider tenants`: who may open sessions, beside those of the coordinator's settings."""

from __future__ import annotations

import argparse
from typing import Any

from coordinator.cli import json_views, table_columns
from coordinator.cli.connection import Ask
from coordinator.cli.output import Shown, cut, output_options, page_options, pages, show
from outrider.wire.v1 import coordinator_pb2 as pb

_ANONYMOUS = "callers need no key, and are all tenant `default`, until the first tenant is created"


def add_parser(commands: Any) -> None:
    tenants = commands.add_parser("tenants", help="create one and its key, list them, revoke one")
    verbs = tenants.add_subparsers(required=True, metavar="VERB", dest="verb")
    created = verbs.add_parser("create", help="a tenant and its key, which is shown once")
    listed = verbs.add_parser("list", help="all, by name")
    revoked = verbs.add_parser("revoke", help="its key opens no more sessions; those that are open go on")
    for verb, what in ((created, "1 to 64 letters, digits, '.', '_' or '-'"), (revoked, "its name")):
        verb.add_argument("tenant", metavar="TENANT", help=what)
        output_options(verb)
    page_options(listed)
    output_options(listed, watch=True)
    created.set_defaults(run=lambda options: show(options, lambda ask: _create(options, ask)))
    listed.set_defaults(run=lambda options: show(options, lambda ask: _list(options, ask)))
    revoked.set_defaults(run=lambda options: show(options, lambda ask: _revoke(options, ask)))


async def _create(options: argparse.Namespace, ask: Ask) -> Shown:
    """The key alone goes to stdout: `OUTRIDER_EDGE_API_KEY=$(outrider tenants create acme)`."""
    answer = await ask("CreateTenant", pb.CreateTenantRequest(name=options.tenant))
    document = {**json_views.tenant(answer.tenant), "key": answer.key}
    told = f"tenant {options.tenant} created; keep its key now, only a hash of it is kept here. Devices give it in"
    return Shown(document, answer.key, f"{told} $OUTRIDER_EDGE_API_KEY")


async def _list(options: argparse.Namespace, ask: Ask) -> Shown:
    anonymous = False

    async def asking(method: str, request: Any) -> Any:
        nonlocal anonymous
        answer = await ask(method, request)
        anonymous = answer.anonymous
        return answer

    found, following = await pages(
        asking, "ListTenants", pb.ListTenantsRequest(after=options.after), "tenants", options.limit
    )
    listed = list(map(json_views.tenant, found))
    text = table_columns.tenants(listed) if listed else "no tenants"
    document = {"tenants": listed, "next": following or None, "anonymous": anonymous}
    return Shown(document, text, _ANONYMOUS if anonymous else cut("tenants", len(listed), following))


async def _revoke(options: argparse.Namespace, ask: Ask) -> Shown:
    answer = await ask("RevokeTenant", pb.RevokeTenantRequest(name=options.tenant))
    document = json_views.tenant(answer.tenant)
    told = (
        f"{options.tenant}: revoked; its key opens no more sessions. `outrider sessions list --tenant {options.tenant}`"
    )
    notice = ""
    if document["configured"]:
        notice = "it has a key by the coordinator's settings, too, which is good until it is removed there"
    return Shown(document, f"{told} shows those that go on", notice)
