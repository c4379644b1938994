"""Create tenants and their keys, list and revoke them (`outrider tenants`)."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views
from coordinator.cli.connection import AdminCall
from coordinator.cli.output import Column, Result, listing
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS = (
    Column("TENANT", lambda t: t["name"]),
    Column("STATE", lambda t: t["state"]),
    Column("CREATED", lambda t: t["created"] or "-"),
    Column("REVOKED", lambda t: t["revoked"] or "-"),
)
_ANONYMOUS = "callers need no key, and are all tenant `default`, until the first tenant is created"


async def create(options: argparse.Namespace, call: AdminCall) -> Result:
    """Create a tenant. The key alone goes to stdout: `OUTRIDER_EDGE_API_KEY=$(outrider tenants create acme)`."""
    answer = await call("CreateTenant", pb.CreateTenantRequest(name=options.tenant))
    document = {**json_views.tenant(answer.tenant), "key": answer.key}
    notice = f"tenant {options.tenant} created; keep its key now, only a hash of it is kept here. Devices give it in"
    return Result(document, lambda: str(answer.key), f"{notice} $OUTRIDER_EDGE_API_KEY")


async def list_tenants(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.ListTenantsRequest(after=options.after)
    found, answer = await listing(call, "ListTenants", request, options.limit, json_views.tenant, COLUMNS, "no tenants")
    document = {**found.document, "anonymous": answer.anonymous}
    return Result(document, found.view, _ANONYMOUS if answer.anonymous else found.notice)


async def revoke(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("RevokeTenant", pb.RevokeTenantRequest(name=options.tenant))
    document = json_views.tenant(answer.tenant)
    text = (
        f"{options.tenant}: revoked; its key opens no more sessions, and those that it opened end with their verifiers'"
        " next report"
    )
    notice = ""
    if document["configured"]:
        notice = "it has a key by the coordinator's settings, too, which is good until it is removed there"
    return Result(document, lambda: text, notice)
