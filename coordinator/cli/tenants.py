"""Create tenants and their keys, set their limits, list and revoke them (`outrider tenants`)."""

from __future__ import annotations

import argparse
import datetime
from dataclasses import replace
from typing import Any

from coordinator.cli.connection import AdminCall
from coordinator.cli.output import Columns, Document, Result, fields, listing
from outrider.core.errors import BadRequest
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS: Columns = {
    "TENANT": lambda t: t["name"],
    "STATE": lambda t: t["state"],
    "CREATED": lambda t: date(t["created_unix"]),
    "REVOKED": lambda t: date(t["revoked_unix"]),
    "PLACES": lambda t: _of(t, "places", "max_places"),
    "OPENS/MIN": lambda t: _of(t, "opens", "opens_per_minute"),
    "TOKENS/MIN": lambda t: _of(t, "tokens", "tokens_per_minute"),
    "STREAMS": lambda t: _limit(t["limits"].get("max_streams")),
}
_LIMITS = tuple(field.name for field in pb.TenantLimits.DESCRIPTOR.fields)
_ANONYMOUS = "callers need no key, and are all tenant `default`, until the first tenant is created"


async def create(options: argparse.Namespace, call: AdminCall) -> Result:
    """Create a tenant. The key alone goes to stdout: `OUTRIDER_EDGE_API_KEY=$(outrider tenants create acme)`."""
    answer = await _update(call, options.tenant, "CREATE", limits=_limits(options))
    notice = f"tenant {options.tenant} created; keep its key now, only a hash of it is kept here. Devices give it in"
    return Result({**_document(answer.tenant), "key": answer.key}, answer.key, f"{notice} $OUTRIDER_EDGE_API_KEY")


async def set_limits(options: argparse.Namespace, call: AdminCall) -> Result:
    """Set limits of a tenant, or have the usual ones again. Raises BadRequest if none is named."""
    limits = _limits(options)
    if not options.defaults and not limits.ListFields():
        raise BadRequest("no limit is named; give one, such as --max-places 8, or --defaults")
    answer = await _update(call, options.tenant, "SET_LIMITS", limits=limits, defaults=options.defaults)
    document = _document(answer.tenant)
    held = ", ".join(f"{name.replace('_', ' ')} {_limit(value)}" for name, value in document["limits"].items())
    return Result(document, f"{options.tenant}: {held}")


async def list_tenants(options: argparse.Namespace, call: AdminCall) -> Result:
    request = pb.ListTenantsRequest(after=options.after)
    found = await listing(call, request, options.limit, _document, COLUMNS, "no tenants")
    return replace(found, notice=_ANONYMOUS) if found.document["anonymous"] else found


async def revoke(options: argparse.Namespace, call: AdminCall) -> Result:
    document = _document((await _update(call, options.tenant, "REVOKE")).tenant)
    view = (
        f"{options.tenant}: revoked; its key opens no more sessions, and those that it opened end with their verifiers'"
        " next report"
    )
    by_settings = "it has a key by the coordinator's settings, too, which is good until it is removed there"
    return Result(document, view, by_settings if document["configured"] else "")


async def _update(call: AdminCall, name: str, action: str, **more: Any) -> pb.UpdateTenantResponse:
    request = pb.UpdateTenantRequest(name=name, action=f"TENANT_ACTION_{action}", **more)
    answer: pb.UpdateTenantResponse = await call("UpdateTenant", request)
    return answer


def date(unix: float) -> str:
    """Return a date in UTC, `-` for 0."""
    return f"{datetime.datetime.fromtimestamp(unix, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}" if unix else "-"


def _document(t: pb.Tenant) -> Document:
    state = "configured" if t.configured else "revoked" if t.revoked_unix else "active"
    return {"name": t.name, "state": state, **fields(t, "key_hash")}


def _limits(options: argparse.Namespace) -> pb.TenantLimits:
    """Return the limits that the command line names."""
    return pb.TenantLimits(**{name: getattr(options, name) for name in _LIMITS if getattr(options, name) is not None})


def _limit(limit: int | None) -> str:
    return str(limit) if limit else "no limit"


def _of(t: Document, used: str, limit: str) -> str:
    most = t["limits"].get(limit)
    return f"{t['use'][used]:.0f}" + (f" of {most}" if most else "")
