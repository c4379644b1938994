"""Test every RPC of a verifier, as the descriptors have them, with every kind of credential."""

from __future__ import annotations

from pathlib import Path

import pytest
from rpcs import CREDENTIALS, TICKET, answer, rpcs_of
from scripted_engine import front

from outrider.core.errors import Unauthenticated
from outrider.wire.v1 import session_pb2


async def authorise(ticket: bytes) -> None:
    if ticket != TICKET:
        raise Unauthenticated("no ticket that is good here")


def test_no_rpc_is_missing_here() -> None:
    assert {rpc.name for rpc in rpcs_of(session_pb2.DESCRIPTOR)} == {"Session", "Describe", "FetchArtifact"}


@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_every_rpc_takes_a_good_ticket_and_nothing_else(tmp_path: Path, credential: str) -> None:
    async with front(tmp_path, authorise=authorise) as running:
        for rpc in rpcs_of(session_pb2.DESCRIPTOR):
            refused = isinstance(await answer(running.channel, rpc, credential), Unauthenticated)
            assert refused is (credential != "a ticket"), rpc.full_name
