"""Test every RPC of a coordinator, as the descriptors have them, with every kind of credential."""

from __future__ import annotations

from typing import Any

import pytest
from rpcs import ADMIN, CREDENTIALS, JOIN, KEY, answer, rpcs_of

from outrider.core.errors import Unauthenticated
from outrider.wire.v1 import coordinator_pb2

ADMITTED = {"Coordinator": "a tenant's key", "Registry": "the join token", "Admin": "the admin token"}
"""The one credential that the RPCs of a service take."""
RPCS = {
    "Coordinator": {"OpenSession", "ResumeSession", "CloseSession", "ListTargets", "OfferRelease"},
    "Registry": {"Register", "Report", "Deregister"},
    "Admin": {
        *("Status", "ListVerifiers", "UpdateVerifier", "ListSessions", "KillSession"),
        *("CreateTenant", "ListTenants", "SetTenantLimits", "RevokeTenant", "ListWindows", "SetWindowBounds"),
        *("PublishRelease", "ListReleases", "UpdateRelease"),
    },
}
"""Whoever adds an RPC says here which service's credential it takes."""


def test_no_rpc_is_missing_here() -> None:
    found = {(rpc.containing_service.name, rpc.name) for rpc in rpcs_of(coordinator_pb2.DESCRIPTOR)}
    assert found == {(service, name) for service, names in RPCS.items() for name in names}


@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_every_rpc_takes_the_credential_of_its_service_and_no_other(start: Any, credential: str) -> None:
    secrets = {"tenant_keys": {"acme": KEY}, "join_token": JOIN, "admin_token": ADMIN}
    coordinator = await start(**secrets)
    for rpc in rpcs_of(coordinator_pb2.DESCRIPTOR):
        refused = isinstance(await answer(coordinator.channel, rpc, credential), Unauthenticated)
        assert refused is (credential != ADMITTED[rpc.containing_service.name]), rpc.full_name
