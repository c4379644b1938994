"""Test how tenants share a verifier's streams and first messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scripted_engine import TARGET, Front, front, until

from cloud_verifier.front import live_sessions
from cloud_verifier.front.counters import FrontCounters, StreamCounters
from outrider.core.errors import Overloaded
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.admission import Shares
from outrider.wire.ticket import Claims, ticket_metadata
from outrider.wire.v1 import session_pb2

STORE_UNIX = 5_000.0
"""The time by the store's clock, which need not be anybody else's."""


def claims(ticket: bytes) -> Claims:
    """Read a ticket "tenant session most-streams place-until" as coordinators sign it."""
    tenant, session_id, most, until_unix = ticket.decode().split()
    return Claims(
        session_id,
        tenant,
        "v1",
        1,
        9,
        time.time() + 60,
        SessionLimits(),
        TARGET,
        api_key_id=f"key of {tenant}",
        max_streams=int(most),
        place_until_unix=float(until_unix),
    )


def ticket(tenant: str, session_id: str, most: int = 0, until_unix: float = 0.0) -> bytes:
    return f"{tenant} {session_id} {most} {until_unix}".encode()


@pytest.fixture
async def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    async def authorise(ticket: bytes) -> Claims:
        return claims(ticket)

    async with front(tmp_path, authorise=authorise, coordinator="127.0.0.1:1") as running:
        yield running


async def refusal(verifier: Front, session_id: str, shown: bytes) -> Overloaded:
    error = await (await verifier.open(session_id, wait=False, ticket=shown)).refusal()
    assert isinstance(error, Overloaded)
    return error


async def test_a_tenant_has_no_more_streams_here_than_its_tickets_allow(verifier: Front) -> None:
    first = await verifier.open("a", ticket=ticket("acme", "a", 1))
    error = await refusal(verifier, "b", ticket("acme", "b", 1))
    assert "tenant acme has all the 1 streams that it may have" in str(error)
    assert error.retry_after_s > 0
    await verifier.open("c", ticket=ticket("bobs", "c", 1))
    again = await verifier.open("a", epoch=2, ticket=ticket("acme", "a", 1))
    again.call.cancel()
    first.call.cancel()
    await until(lambda: "a" not in verifier.tenants)
    await verifier.open("b", epoch=3, ticket=ticket("acme", "b", 1))


@pytest.mark.parametrize(("everybody", "tenants"), [(True, []), (False, ["acme"])])
async def test_while_tenants_wait_or_one_has_used_its_tokens_up_only_sessions_attach_whose_place_is_kept(
    verifier: Front, monkeypatch: pytest.MonkeyPatch, everybody: bool, tenants: list[str]
) -> None:
    live, kept = verifier.service.live, ticket("acme", "a", until_unix=STORE_UNIX + 60)
    live.hold_back(STORE_UNIX, everybody, tenants)
    for place_until in (0.0, STORE_UNIX - 1):
        error = await refusal(verifier, "b", ticket("acme", "b", until_unix=place_until))
        assert "resume it at the coordinator" in str(error)
    (await verifier.open("a", ticket=kept)).call.cancel()
    await until(lambda: not verifier.tenants)
    live.hold_back(STORE_UNIX + 100, everybody, tenants)
    (await verifier.open("a", epoch=2, ticket=kept)).call.cancel()  # it was here a moment ago
    await until(lambda: not verifier.tenants)
    monkeypatch.setattr(live_sessions, "RECENT_S", 0.0)
    await refusal(verifier, "a", kept)
    monkeypatch.setattr(live_sessions, "TOLD_S", 0.0)  # the coordinator is silent: nobody is taken to wait
    await verifier.open("b", epoch=3, ticket=ticket("acme", "b"))


async def test_a_tenant_that_opens_nothing_on_its_streams_keeps_nobody_out(
    verifier: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier.service, "_opening", Shares(8, "streams that have sent no Open yet"))
    shown = ticket_metadata(ticket("acme", "a"))
    silent = [verifier.stub.Session(metadata=shown) for _ in range(12)]
    await until(lambda: sum(call.done() for call in silent) == 8)
    error = await refusal(verifier, "a", ticket("acme", "a"))
    assert "tenant acme has 4 streams that have sent no Open yet" in str(error)
    await verifier.open("b", ticket=ticket("bobs", "b"))
    for call in silent:
        call.cancel()
    await until(lambda: verifier.service._opening.held == 0)
    await verifier.open("c", epoch=2, ticket=ticket("acme", "c"))


def test_tokens_count_for_their_tenant_until_a_report_has_told_them() -> None:
    counters = FrontCounters()
    streams = [StreamCounters(counters, tenant) for tenant in ("acme", "acme", "bobs", "")]
    for stream in streams:
        stream.commit(session_pb2.Commit(token=[1, 2, 3]))
    batch = {"acme": 6, "bobs": 3}
    assert counters.batch() == (1, batch)
    streams[0].commit(session_pb2.Commit(token=[4]))
    assert counters.batch() == (1, batch)  # no report with it was answered: what comes later waits
    counters.told()
    assert counters.batch() == (2, {"acme": 1})
    counters.told()
    assert counters.batch() == (2, {})
