"""Test that operators can keep new sessions off verifiers, and have verifiers drain."""

import pytest

from outrider.core.errors import BadRequest, NotFound
from outrider.wire.v1 import coordinator_pb2 as pb

CORDON, UNCORDON, DRAIN = pb.VERIFIER_ACTION_CORDON, pb.VERIFIER_ACTION_UNCORDON, pb.VERIFIER_ACTION_DRAIN


async def steer(coordinator, verifier_id: str, order: pb.VerifierAction) -> pb.VerifierStatus:
    answer = await coordinator.admin.UpdateVerifier(pb.UpdateVerifierRequest(verifier_id=verifier_id, action=order))
    return answer.verifier


async def shown(coordinator, verifier_id: str) -> pb.VerifierStatus:
    answer = await coordinator.admin.ListVerifiers(pb.ListVerifiersRequest(verifier_id=verifier_id))
    return answer.verifiers[0]


async def chosen(coordinator, opens: int = 6) -> set[str]:
    return {(await coordinator.open()).primary.verifier_id for _ in range(opens)}


@pytest.fixture
async def two(coordinator):
    """Start a coordinator with v1 and v2."""
    for name in ("v1", "v2"):
        await coordinator.join(name, capacity=50)
    return coordinator


async def test_a_cordon_outlives_reports_new_registrations_and_another_process_of_the_same_id(two):
    await steer(two, "v1", CORDON)
    await two.report("v1", draining=False)
    assert (await shown(two, "v1")).cordoned
    await two.join("v1", capacity=50)
    assert (await shown(two, "v1")).cordoned
    await two.registry.Deregister(pb.DeregisterRequest(verifier_id="v1", instance=1))
    await two.join("v1", capacity=50, instance=2)
    assert (await shown(two, "v1")).cordoned
    assert await chosen(two) == {"v2"}


async def test_what_runs_on_a_cordoned_verifier_goes_on(two):
    await steer(two, "v2", CORDON)
    opened = await two.open()
    await steer(two, "v1", CORDON)
    assert not (await two.report("v1", [opened.session_id])).revocations
    [session] = await two.placed()
    assert (session.telemetry.session_id, session.verifier_id) == (opened.session_id, "v1")
    # Its device lost the stream and comes back by way of the coordinator: it still has its place there.
    assert (await two.resume(opened)).primary.verifier_id == "v1"


async def test_a_cordoned_verifier_is_nobodys_standby(two):
    assert (await two.open()).HasField("standby")
    await steer(two, "v1", CORDON)
    assert not (await two.open()).HasField("standby")


async def test_a_verifier_that_is_not_there_cannot_be_steered(two, refused):
    for order in (CORDON, UNCORDON, DRAIN):
        error = await refused(steer(two, "v9", order))
        assert isinstance(error, NotFound)
        assert "outrider verifiers list" in str(error)
    assert isinstance(await refused(steer(two, "v1", pb.VERIFIER_ACTION_UNSPECIFIED)), BadRequest)
    assert isinstance(await refused(steer(two, "v/1", CORDON)), BadRequest)


async def test_a_drain_is_reported_to_the_instance_that_runs_and_to_none_after_it(two):
    assert not (await two.report("v1")).drain
    assert (await steer(two, "v1", DRAIN)).cordoned
    assert (await two.report("v1")).drain
    assert not (await two.report("v2")).drain
    assert await chosen(two) == {"v2"}
    await two.join("v1", capacity=50, instance=2)
    assert not (await two.report("v1", instance=2)).drain  # or whatever restarts it would end it again and again
    assert (await shown(two, "v1")).cordoned


async def test_a_cordon_leaves_an_order_to_drain_and_an_uncordon_takes_it_back(two):
    await steer(two, "v1", DRAIN)
    await steer(two, "v1", CORDON)
    assert (await two.report("v1")).drain
    await steer(two, "v1", UNCORDON)
    assert not (await two.report("v1")).drain
