"""Test that operators' lists of verifiers and sessions are bounded, in pages, and sorted by name."""

import pytest

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


async def test_a_session_that_was_placed_shows_where_and_what_for(coordinator):
    await coordinator.join("v1")
    await coordinator.join("v2")
    opened = await coordinator.open(draft_release="abc", traffic_class="code")
    [shown] = (await sessions(coordinator, session_id=opened.session_id)).sessions
    assert not shown.reported
    assert {shown.verifier_id, shown.standby} == {"v1", "v2"}
    telemetry = shown.telemetry
    assert (telemetry.draft_release, telemetry.traffic_class, telemetry.tenant) == ("abc", "code", "default")


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
