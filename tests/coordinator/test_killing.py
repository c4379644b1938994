"""Test that sessions ended by an operator stop at once and stay ended."""

import pytest
from peers import revoked

from outrider.core.errors import BadRequest, Killed, NotFound, Overloaded
from outrider.wire.v1 import coordinator_pb2 as pb


async def kill(coordinator, session_id: str) -> str:
    request = pb.UpdateSessionRequest(session_id=session_id, action="SESSION_ACTION_KILL")
    return (await coordinator.admin.UpdateSession(request)).verifier_id


@pytest.fixture
async def opened(coordinator):
    """Open a session on v1, which has room for no other."""
    await coordinator.join("v1", capacity=1)
    session = await coordinator.open()
    await coordinator.report("v1", [session.session_id])
    return session


async def test_every_verifier_is_informed_with_its_next_report(coordinator, opened):
    await coordinator.join("v2")
    assert await kill(coordinator, opened.session_id) == "v1"
    for verifier_id, sessions in (("v1", [opened.session_id]), ("v2", [])):
        answer = await coordinator.report(verifier_id, sessions)
        assert revoked(answer) == [("session_id", opened.session_id)]
        assert list(answer.closed) == []
        later = await coordinator.report(verifier_id, sessions, seen=answer.revocations_seen)
        assert revoked(later) == []
        assert later.revocations_seen == answer.revocations_seen


async def test_its_place_is_free_and_no_report_takes_it_again(coordinator, opened, refused):
    assert isinstance(await refused(coordinator.open()), Overloaded)
    await kill(coordinator, opened.session_id)
    await coordinator.report("v1", [opened.session_id])
    assert not await coordinator.placed()
    await coordinator.report("v1")
    await coordinator.open()


async def test_no_ticket_of_it_brings_it_back(coordinator, opened, refused):
    await kill(coordinator, opened.session_id)
    assert isinstance(await refused(coordinator.resume(opened)), Killed)
    await coordinator.close(opened)  # as its device does in the end
    assert isinstance(await refused(coordinator.resume(opened)), Killed)


async def test_one_that_went_on_by_its_standby_is_ended_there(coordinator, opened):
    await coordinator.join("v2")
    await kill(coordinator, opened.session_id)
    assert revoked(await coordinator.report("v2", [opened.session_id])) == [("session_id", opened.session_id)]


async def test_one_that_is_not_there_is_not_found(coordinator, opened, refused):
    await coordinator.close(opened)
    for session_id in (opened.session_id, "nobody"):
        error = await refused(kill(coordinator, session_id))
        assert isinstance(error, NotFound)
        assert "outrider sessions list" in str(error)
    assert isinstance(await refused(kill(coordinator, "a b")), BadRequest)
