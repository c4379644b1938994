"""Test how tenants share a verifier's streams and downloads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from scripted_engine import TARGET, Front, front, until

from cloud_verifier.front import live_sessions, service
from cloud_verifier.front.artifacts import CHUNK_BYTES, WAIT_S, Catalogue, Downloads
from cloud_verifier.front.counters import FrontCounters, StreamCounters
from outrider.core.errors import Overloaded, PermissionDenied, Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.status import error_from_rpc
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

    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "draft.gguf").write_bytes(bytes(16 * CHUNK_BYTES))
    catalogue = Catalogue.of_target(tmp_path, tmp_path / "draft.gguf")
    monkeypatch.setattr("cloud_verifier.front.service.MAX_DOWNLOADS", 4)
    async with front(tmp_path, authorise=authorise, catalogue=catalogue, coordinator="127.0.0.1:1") as running:
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


async def test_while_tenants_wait_only_sessions_attach_whose_place_is_kept(verifier: Front) -> None:
    await verifier.open("hoarded-1", ticket=ticket("acme", "hoarded-1"))
    verifier.service.live.hold_back(STORE_UNIX, True, ())
    for place_until in (0.0, STORE_UNIX - 1):
        error = await refusal(verifier, "hoarded-2", ticket("acme", "hoarded-2", until_unix=place_until))
        assert "resume it at the coordinator" in str(error)
    await verifier.open("placed", epoch=2, ticket=ticket("bobs", "placed", until_unix=STORE_UNIX + 60))
    verifier.service.live.hold_back(STORE_UNIX, False, ())
    await verifier.open("hoarded-2", epoch=3, ticket=ticket("acme", "hoarded-2"))


async def test_a_tenant_that_has_used_its_tokens_up_attaches_no_hoarded_session(verifier: Front) -> None:
    verifier.service.live.hold_back(STORE_UNIX, False, ["acme"])
    assert "tenant acme has used its tokens up" in str(await refusal(verifier, "a", ticket("acme", "a")))
    await verifier.open("b", ticket=ticket("bobs", "b"))
    await verifier.open("c", epoch=2, ticket=ticket("acme", "c", until_unix=STORE_UNIX + 60))


async def test_a_session_that_was_here_a_moment_ago_comes_back_although_tenants_wait(
    verifier: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier.service.live.hold_back(STORE_UNIX, True, ())
    shown = ticket("acme", "a", until_unix=STORE_UNIX + 60)
    (await verifier.open("a", ticket=shown)).call.cancel()
    await until(lambda: "a" not in verifier.tenants)
    verifier.service.live.hold_back(STORE_UNIX + 100, True, ())
    (await verifier.open("a", epoch=2, ticket=shown)).call.cancel()
    await until(lambda: "a" not in verifier.tenants)
    monkeypatch.setattr(live_sessions, "RECENT_S", 0.0)
    await refusal(verifier, "a", shown)


async def test_a_ticket_that_is_revoked_while_its_open_is_awaited_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[bytes] = []

    async def authorise(ticket: bytes) -> Claims:
        shown.append(ticket)
        if len(shown) > 2:
            raise PermissionDenied("revoked")
        return claims(ticket)

    (tmp_path / "tokenizer.json").write_text("{}")
    settings = {"catalogue": Catalogue.of_target(tmp_path, None), "coordinator": "127.0.0.1:1"}
    async with front(tmp_path, authorise=authorise, **settings) as verifier:
        await verifier.open("a", ticket=ticket("acme", "a"))
        assert len(shown) == 1  # its Open came at once
        monkeypatch.setattr(service, "AUTHORISED_S", 0.0)
        late = await verifier.open("b", epoch=2, wait=False, ticket=ticket("acme", "b"))
        assert isinstance(await late.refusal(), PermissionDenied)
        assert len(shown) == 3


@pytest.mark.parametrize("after_its_end", [True, False])
async def test_a_session_comes_back_so_many_times_in_a_row_and_then_needs_a_place(
    verifier: Front, monkeypatch: pytest.MonkeyPatch, after_its_end: bool
) -> None:
    monkeypatch.setattr(live_sessions, "MOST_RETURNS", 2)
    shown = ticket("acme", "a", until_unix=STORE_UNIX + 60)
    for epoch in range(1, 4):
        stream = await verifier.open("a", epoch=epoch, ticket=shown)
        verifier.service.live.hold_back(STORE_UNIX + 100, True, ())
        if after_its_end:
            stream.call.cancel()
            await until(lambda: "a" not in verifier.tenants)
    error = await (await verifier.open("a", epoch=8, wait=False, ticket=shown)).refusal()
    assert "no place is kept for this session" in str(error)
    await verifier.open("a", epoch=9, ticket=ticket("acme", "a", until_unix=STORE_UNIX + 200))


async def test_without_the_coordinator_nobody_is_taken_to_wait(
    verifier: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_sessions, "TOLD_S", 0.2)
    verifier.service.live.hold_back(STORE_UNIX, True, ())
    await asyncio.sleep(0.3)
    await verifier.open("a", ticket=ticket("acme", "a"))


async def test_a_tenant_that_opens_nothing_on_its_streams_keeps_nobody_out(verifier: Front) -> None:
    most, shown = 2 * verifier.service._config.max_sessions, ticket_metadata(ticket("acme", "a"))
    silent = [verifier.stub.Session(metadata=shown) for _ in range(most + 20)]
    await until(lambda: sum(call.done() for call in silent) == 20)
    assert f"{most} streams of tenant acme" in str(await refusal(verifier, "a", ticket("acme", "a")))
    await verifier.open("b", ticket=ticket("bobs", "b"))
    for call in silent:
        call.cancel()
    await until(lambda: not verifier.service._opening)
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


async def test_a_stream_counts_for_its_tenant_after_its_end_too(verifier: Front) -> None:
    stream = await verifier.open("a", ticket=ticket("acme", "a"))
    verifier.engine.commit("a", 1, 0, [4, 5])
    assert (await stream.read()).commit.token == [4, 5]
    stream.call.cancel()
    await until(lambda: not verifier.tenants)
    assert verifier.service.counters.tenant_tokens == {"acme": 2}


async def test_a_tenant_with_every_download_yields_some_to_one_that_waits(verifier: Front) -> None:
    draft = next(artifact for artifact in verifier.service._catalogue if artifact.role == "draft")
    request = session_pb2.FetchArtifactRequest(hash=draft.hash)
    held = [verifier.stub.FetchArtifact(request, metadata=ticket_metadata(ticket("acme", "a"))) for _ in range(4)]
    await until(lambda: len(verifier.service._downloads) == 4)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await verifier.stub.FetchArtifact(request, metadata=ticket_metadata(ticket("bobs", "b"))).read()
    assert isinstance(error_from_rpc(caught.value), Overloaded)

    async def whole(call) -> int:
        return sum([len(chunk.data) async for chunk in call])

    outcomes = await asyncio.gather(*map(whole, held), return_exceptions=True)
    errors = [error_from_rpc(one) for one in outcomes if isinstance(one, grpc.aio.AioRpcError)]
    assert [type(one) for one in errors] == [Unavailable] * 3
    assert all("yields its place" in str(one) for one in errors)
    mine = verifier.stub.FetchArtifact(request, metadata=ticket_metadata(ticket("bobs", "b")))
    assert await whole(mine) == draft.size


def test_who_has_more_downloads_gets_no_further_one_while_one_with_fewer_waits() -> None:
    now = 0.0
    downloads = Downloads(3, clock=lambda: now)
    with ExitStack() as acme, ExitStack() as bobs:
        for _ in range(3):
            acme.enter_context(downloads.place("acme"))
        downloads.check("acme")  # nobody waits
        with pytest.raises(Overloaded):
            bobs.enter_context(downloads.place("bobs"))
        with pytest.raises(Unavailable):
            downloads.check("acme")
        acme.pop_all().close()
        acme.enter_context(downloads.place("acme"))
        with pytest.raises(Overloaded, match="fewer downloads"):
            acme.enter_context(downloads.place("acme"))
        downloads.check("acme")  # 1 to 0: whoever had it, the other would have one fewer
        bobs.enter_context(downloads.place("bobs"))
        now = WAIT_S + 1
        acme.enter_context(downloads.place("acme"))
        assert len(downloads) == 3
    assert len(downloads) == 0
