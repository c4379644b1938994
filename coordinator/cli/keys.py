"""List and revoke the keys with which coordinators sign tickets (`outrider keys`)."""

from __future__ import annotations

import argparse

from coordinator.cli import json_views
from coordinator.cli.connection import AdminCall
from coordinator.cli.output import Column, Result, table
from outrider.wire.v1 import coordinator_pb2 as pb

COLUMNS = (
    Column("KEY", lambda k: k["key"]),
    Column("STATE", lambda k: k["state"]),
    Column("SIGNS HERE", lambda k: "yes" if k["own"] else "-"),
    Column("SEEN", lambda k: k["seen"] or "-"),
    Column("REVOKED", lambda k: k["revoked"] or "-"),
)
_BELIEVING = "there is no cluster key, so that every public key in Redis is believed: docs/operations.md, Threat model"


async def list_keys(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("ListKeys", pb.ListKeysRequest())
    document = {"keys": list(map(json_views.key, answer.keys)), "pinned": answer.pinned}
    notice = "" if answer.pinned else _BELIEVING
    return Result(document, lambda: table(COLUMNS, document["keys"]), notice)


async def revoke(options: argparse.Namespace, call: AdminCall) -> Result:
    answer = await call("RevokeKey", pb.RevokeKeyRequest(key_id=options.key))
    text = (
        f"{options.key}: revoked; the tickets that it signed, and their sessions, end with their verifiers' next"
        " report, and its coordinator makes another key"
    )
    return Result(json_views.key(answer.key), lambda: text)
