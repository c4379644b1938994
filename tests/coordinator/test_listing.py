"""Test that operators' lists of verifiers and sessions are bounded, in pages, and sorted by name."""

import pytest

from coordinator.api import admin_handlers
from outrider.core.errors import BadRequest, NotFound
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry


async def sessions(coordinator, **request) -> pb.ListSessionsResponse:
    return await coordinator.admin.ListSessions(pb.ListSessionsRequest(**request))


async def verifiers(coordinator, **request) -> pb.ListVerifiersResponse:
    return await coordinator.admin.ListVerifiers(pb.ListVerifiersRequest(**request))


async def every_page(coordinator, **request) -> list[list[str]]:
    found, after = [], ""
    while True:
        answer = await sessions(coordinator, **request, after=after)
        found.append([s.telemetry.session_id for s in answer.sessions])
        if not answer.next:
            return found
        after = answer.next


@pytest.fixture
async def busy(coordinator):
    """Report five sessions on v1, of which two are bob's, and three on v2."""
    for name, ids in (("v1", "abcde"), ("v2", "xyz")):
        await coordinator.join(name)
        tenant = {"b": "bob", "d": "bob"}
        await coordinator.report(
            name,
            [
                SessionTelemetry(
                    session_id=i,
                    tenant=tenant.get(i, "ann"),
                    epoch=5,
                    steps=10,
                    committed=25,
                    evaluated=40,
                    accepted=10,
                )
                for i in reversed(ids)
            ],
            min_acceptance=0.25,
        )
    return coordinator


async def test_sessions_come_by_verifier_and_id_in_pages_without_gap_or_repetition(busy):
    assert await every_page(busy, limit=3) == [["a", "b", "c"], ["d", "e", "x"], ["y", "z"]]
    assert await every_page(busy) == [list("abcdexyz")]


async def test_sessions_of_one_verifier_or_of_one_tenant(busy, refused):
    assert await every_page(busy, verifier_id="v2") == [["x", "y", "z"]]
    assert await every_page(busy, tenant="bob") == [["b", "d"]]
    assert await every_page(busy, tenant="nobody") == [[]]
    assert isinstance(await refused(sessions(busy, verifier_id="v9")), NotFound)


async def test_a_tenants_few_sessions_are_found_over_several_pages(busy, monkeypatch):
    monkeypatch.setattr(admin_handlers, "MAX_SCANNED", 1)
    assert await every_page(busy, tenant="bob") == [["b", "d"], [], []]


async def test_a_session_shows_what_was_reported_of_it(busy):
    [shown] = (await sessions(busy, session_id="a")).sessions
    assert (shown.verifier_id, shown.telemetry.tenant, shown.reported) == ("v1", "ann", True)
    assert (shown.telemetry.steps, shown.telemetry.committed) == (10, 25)
    assert (shown.telemetry.evaluated, shown.telemetry.accepted) == (40, 10)


async def test_a_session_that_was_placed_shows_where_and_what_for(coordinator):
    await coordinator.join("v1")
    await coordinator.join("v2")
    opened = await coordinator.open(draft_release="abc", traffic_class="code")
    [shown] = (await sessions(coordinator, session_id=opened.session_id)).sessions
    assert not shown.reported
    assert {shown.verifier_id, shown.standby} == {"v1", "v2"}
    telemetry = shown.telemetry
    assert (telemetry.draft_release, telemetry.traffic_class, telemetry.tenant) == ("abc", "code", "default")


async def test_one_that_went_elsewhere_is_listed_where_it_is_and_once(busy):
    await busy.report("v2", [SessionTelemetry(session_id="a", epoch=6, committed=30)])
    found = [s for s in (await sessions(busy)).sessions if s.telemetry.session_id == "a"]
    assert [s.verifier_id for s in found] == ["v2"]
    [shown] = (await sessions(busy, session_id="a")).sessions
    assert (shown.verifier_id, shown.telemetry.epoch) == ("v2", 6)


async def test_verifiers_come_by_id_in_pages_with_what_their_sessions_did(busy, refused):
    first = await verifiers(busy, limit=1)
    assert ([v.verifier_id for v in first.verifiers], first.next) == (["v1"], "v1")
    rest = await verifiers(busy, limit=1, after=first.next)
    assert ([v.verifier_id for v in rest.verifiers], rest.next) == (["v2"], "")
    [shown] = (await verifiers(busy, verifier_id="v1")).verifiers
    telemetry = shown.telemetry
    assert (telemetry.evaluated, telemetry.accepted, telemetry.min_acceptance) == (200, 50, 0.25)
    assert isinstance(await refused(verifiers(busy, verifier_id="v9")), NotFound)


async def test_a_verifiers_round_trip_is_the_median_of_those_that_are_measured(coordinator):
    await coordinator.join("v1")
    reports = [SessionTelemetry(session_id=f"s{i}", rtt_ms=ms) for i, ms in enumerate((0.0, 10.0, 20.0, 90.0))]
    await coordinator.report("v1", reports)
    assert (await verifiers(coordinator)).verifiers[0].telemetry.rtt_ms == 20.0


@pytest.mark.parametrize(
    "request_",
    [
        {"limit": 1_001},
        {"after": "no-slash"},
        {"after": "v1/"},
        {"after": "/a"},
        {"tenant": "a b"},
        {"session_id": "a/b"},
    ],
)
async def test_senseless_questions_are_refused(busy, refused, request_):
    assert isinstance(await refused(sessions(busy, **request_)), BadRequest)


async def test_status_counts_what_it_leaves_out(start):
    coordinator = await start(status_sessions=3)
    await coordinator.join("v1")
    await coordinator.report("v1", list("abcde"))
    status = await coordinator.status()
    assert (len(status.sessions), status.total_sessions, status.total_verifiers) == (3, 5, 1)
