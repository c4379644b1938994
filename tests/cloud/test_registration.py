"""Test a verifier's lease against a scripted registry on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from scripted_engine import until

from cloud_verifier.config import VerifierConfig
from cloud_verifier.front.counters import FrontCounters
from cloud_verifier.front.registration import RegistryClient, directives_of
from outrider.core.errors import Killed, Unauthenticated, Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.wire import channels
from outrider.wire.status import abort
from outrider.wire.ticket import Claims, Signer, Target
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc, session_pb2
from outrider.wire.v1.telemetry_pb2 import VerifierTelemetry


class Registry(coordinator_pb2_grpc.RegistryServicer):
    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.registrations: list[pb.RegisterRequest] = []
        self.reports: list[pb.ReportRequest] = []
        self.left: list[pb.DeregisterRequest] = []
        self.known = True
        self.refuse: Exception | None = None
        self.interval_ms = 100
        self.directives: list[pb.SessionDirective] = []
        self.release_serial = 0
        self.refuse_reports: Exception | None = None
        self.revocations: list[pb.Revocation] = []
        self.drain = False
        self.behind_s = 0.0
        """How far this registry's clock is behind the verifier's."""

    async def Register(self, request, context):
        self.registrations.append(request)
        if self.refuse is not None:
            await abort(context, self.refuse)
        self.known = True
        unix = time.time() - self.behind_s
        return pb.RegisterResponse(lease_ms=5000, report_interval_ms=self.interval_ms, public_keys=self.keys, unix=unix)

    async def Report(self, request, context):
        self.reports.append(request)
        if self.refuse_reports is not None:
            await abort(context, self.refuse_reports)
        return pb.ReportResponse(
            known=self.known,
            public_keys=self.keys,
            directives=self.directives,
            release_serial=self.release_serial,
            revocations=self.revocations,
            revocations_seen=len(self.revocations),
            drain=self.drain,
            unix=time.time() - self.behind_s,
        )

    async def Deregister(self, request, context):
        self.left.append(request)
        return pb.DeregisterResponse()

    def trust(self, signer: Signer) -> Signer:
        self.keys[signer.key_id] = signer.public_key
        return signer


@contextlib.asynccontextmanager
async def serving(registry: Registry, address: str = "127.0.0.1:0"):
    server = channels.server()
    coordinator_pb2_grpc.add_RegistryServicer_to_server(registry, server)
    port = channels.bind(server, address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def registration(address: str):
    config = VerifierConfig(model=Path("m"), coordinator=address)
    made = RegistryClient(config, pb.RegisterRequest(verifier_id="v1", address="127.0.0.1:1"), FrontCounters())
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def reporting(made: RegistryClient):
    """Report again and again, as the verifier's process does."""

    async def forever() -> None:
        while True:
            await made.report(pb.ReportRequest(verifier=VerifierTelemetry(kv_used=3)))
            await made.pause()

    task = asyncio.create_task(forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def registry():
    return Registry()


def claims(audience: str = "v1", expires_in: float = 60.0) -> Claims:
    return Claims("s", "acme", audience, 1, 9, time.time() + expires_in, SessionLimits(), Target("t", "w", "k"))


async def test_registering_goes_on_until_it_works_or_trying_again_cannot_mend_it(registry, monkeypatch):
    pauses = []

    def backoff_s(failures: int, first_s: float, max_s: float) -> float:
        pauses.append(failures)
        if failures == 3:
            registry.refuse = Unauthenticated("the join token is wrong")
        return 0.0

    monkeypatch.setattr("cloud_verifier.front.registration.backoff_s", backoff_s)
    registry.refuse = Unavailable("not yet")
    async with serving(registry) as address, registration(address) as made:
        with pytest.raises(Unauthenticated, match="join token"):
            await made.register()
        registry.refuse = None
        await made.register()
        await made.leave()
    assert pauses == [1, 2, 3]
    assert [(r.verifier_id, r.instance) for r in registry.left] == [("v1", registry.registrations[0].instance)]


@pytest.mark.parametrize(("behind_s", "where"), [(4_300.0, "4300 s ahead of"), (-4_300.0, "4300 s behind")])
async def test_tickets_are_judged_by_the_coordinators_clock_and_a_wrong_one_is_named(registry, behind_s, where, caplog):
    registry.behind_s = behind_s
    signer = registry.trust(Signer.generate())
    async with serving(registry) as address, registration(address) as made:
        await made.register()
        assert (await made.authorise(signer.sign(claims(expires_in=60.0 - behind_s)))).session_id == "s"
        with pytest.raises(Unauthenticated, match="compare the clocks"):
            await made.authorise(signer.sign(claims(expires_in=-60.0 - behind_s)))
        assert made.clock_ahead_s == pytest.approx(behind_s, abs=5.0)
        assert f"clock is {where} the coordinator's" in caplog.text
        registry.behind_s = 0.0
        await made.report(pb.ReportRequest())
        assert abs(made.clock_ahead_s) < 5.0


async def test_a_lost_lease_is_taken_again_by_the_same_instance(registry):
    async with serving(registry) as address, registration(address) as made:
        await made.register()
        registry.known = False
        async with reporting(made):
            await until(lambda: len(registry.registrations) == 2)
            await until(lambda: len(registry.reports) >= 3)
    first, second = registry.registrations
    assert first.instance == second.instance == registry.reports[0].instance != 0
    assert registry.reports[0].verifier_id == "v1"
    assert registry.reports[0].verifier.kv_used == 3


async def test_a_report_brings_the_directives_of_sessions_and_the_serial_of_the_releases(registry):
    given = session_pb2.Directive(
        window_nodes=9, window_depth=8, nodes_per_step=3, min_acceptance=0.25, draft_wait_ms=4
    )
    registry.release_serial = 3
    registry.directives = [pb.SessionDirective(session_id="s", epoch=7, directive=given)]
    async with serving(registry) as address, registration(address) as made:
        await made.register()
        answer = await made.report(pb.ReportRequest())
        assert list(directives_of(answer)) == [("s", 7, given)]
        assert made.release_serial == 3
        mad = session_pb2.Directive(min_acceptance=2.0)
        registry.directives.insert(0, pb.SessionDirective(session_id="x", epoch=7, directive=mad))
        answer = await made.report(pb.ReportRequest())
        assert list(directives_of(answer)) == [("s", 7, given)]  # the other one holds


async def test_a_report_brings_what_operators_have_ordered(registry):
    async with serving(registry) as address, registration(address) as made:
        await made.register()
        answer = await made.report(pb.ReportRequest())
        assert not answer.drain
        ticket_bytes = registry.trust(Signer.generate()).sign(claims())
        await made.report(pb.ReportRequest())
        assert (await made.authorise(ticket_bytes)).session_id == "s"
        registry.revocations, registry.drain = [pb.Revocation(session_id="s", until_unix=time.time() + 60)], True
        assert (await made.report(pb.ReportRequest())).drain
        assert registry.reports[-1].revocations_seen == 0
        with pytest.raises(Killed):
            await made.authorise(ticket_bytes)
        await made.report(pb.ReportRequest())
        assert registry.reports[-1].revocations_seen == 1
        registry.refuse_reports = Unauthenticated("not now")
        assert not (await made.report(pb.ReportRequest())).drain


async def test_known_keys_are_believed_while_the_coordinator_is_away_and_leaving_does_not_need_it(registry):
    signer = registry.trust(Signer.generate())
    async with contextlib.AsyncExitStack() as stack:
        async with serving(registry) as address:
            made = await stack.enter_async_context(registration(address))
            await made.register()
            await made.report(pb.ReportRequest())
        assert (await made.authorise(signer.sign(claims()))).session_id == "s"
        assert await made.report(pb.ReportRequest()) == pb.ReportResponse()
        assert made._hurried.is_set()  # another coordinator may take it
        assert await made.report(pb.ReportRequest()) == pb.ReportResponse()
        assert not made._hurried.is_set()
        await made.leave()
        assert registry.left == []
