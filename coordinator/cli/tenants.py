"""Create tenants and their keys, set their limits, list and revoke them (`outrider tenants`)."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views
from coordinator.cli.connection import AdminCall
from coordinator.cli.output import Column, Result, listing
from outrider.core.errors import BadRequest
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS = (
    Column("TENANT", lambda t: t["name"]),
    Column("STATE", lambda t: t["state"]),
    Column("CREATED", lambda t: t["created"] or "-"),
    Column("REVOKED", lambda t: t["revoked"] or "-"),
    Column("PLACES", lambda t: _of(t["use"]["places"], t["limits"]["max_places"])),
    Column("OPENS/MIN", lambda t: _of(t["use"]["opens"], t["limits"]["opens_per_minute"])),
    Column("TOKENS/MIN", lambda t: _of(t["use"]["tokens"], t["limits"]["tokens_per_minute"])),
    Column("STREAMS", lambda t: _limit(t["limits"]["max_streams"])),
)
_LIMITS = tuple(field.name for field in pb.TenantLimits.DESCRIPTOR.fields)
_ANONYMOUS = "callers need no key, and are all tenant `default`, until the first tenant is created"


async def create(options: argparse.Namespace, call: AdminCall) -> Result:
    """Create a tenant. The key alone goes to stdout: `OUTRIDER_EDGE_API_KEY=$(outrider tenants create acme)`."""
    answer = await call("CreateTenant", pb.CreateTenantRequest(name=options.tenant, limits=_limits(options)))
    document = {**json_views.tenant(answer.tenant), "key": answer.key}
    notice = f"tenant {options.tenant} created; keep its key now, only a hash of it is kept here. Devices give it in"
    return Result(document, lambda: str(answer.key), f"{notice} $OUTRIDER_EDGE_API_KEY")


async def set_limits(options: argparse.Namespace, call: AdminCall) -> Result:
    """Set limits of a tenant, or have those of the coordinator's settings again. Raises BadRequest if none is named."""
    limits = _limits(options)
    if not options.defaults and not limits.ListFields():
        raise BadRequest("no limit is named; give one, such as --max-places 8, or --defaults")
    request = pb.SetTenantLimitsRequest(name=options.tenant, limits=limits, defaults=options.defaults)
    document = json_views.tenant((await call("SetTenantLimits", request)).tenant)
    held = ", ".join(f"{name.replace('_', ' ')} {_limit(value)}" for name, value in document["limits"].items())
    return Result(document, lambda: f"{options.tenant}: {held}", "")


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


def _limits(options: argparse.Namespace) -> pb.TenantLimits:
    """Return the limits that the command line names."""
    return pb.TenantLimits(**{name: getattr(options, name) for name in _LIMITS if getattr(options, name) is not None})


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def _of(used: int, limit: int | None) -> str:
    return str(used) if limit is None else f"{used} of {limit}"
