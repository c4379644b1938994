"""Test that epochs only grow, whatever is lost, and that a session resumes where its tokens are the same."""

import asyncio
import itertools
import time

import pytest
from peers import identity, until

from outrider.core.errors import PermissionDenied, Unauthenticated, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb


def ranges(*openings):
    """Return the epoch ranges of all grants, in the order in which they were given out."""
    grants = [g for o in openings for g in ((o.primary, o.standby) if o.HasField("standby") else (o.primary,))]
    return [(g.epoch_first, g.epoch_last) for g in grants]


def grows(found):
    return all(first <= last for first, last in found) and all(
        earlier[1] < later[0] for earlier, later in itertools.pairwise(found)
    )


async def test_every_grant_of_a_session_lies_above_the_one_before(coordinator):
    for i in range(1, 4):
        await coordinator.join(f"v{i}")
    found = [await coordinator.open()]
    for _ in range(20):
        found.append(await coordinator.resume(found[-1]))
    assert grows(ranges(*found))
    assert all(last - first == 255 for first, last in ranges(*found))


async def test_a_resume_exceeds_what_the_device_has_used(coordinator):
    await coordinator.join("v1")
    opened = await coordinator.open()
    ahead = opened.primary.epoch_last + 10**9
    assert (await coordinator.resume(opened, last_epoch=ahead)).primary.epoch_first > ahead


async def test_two_coordinators_get_disjoint_epochs_while_redis_loses_everything(start, redis):
    one, two = await start(), await start()
    await one.join("v1")
    await one.join("v2")
    opened = await one.open()
    before = await asyncio.gather(*((one, two)[i % 2].resume(opened) for i in range(10)))
    redis.stop()
    redis.start()
    await one.join("v1")
    await one.join("v2")
    after = await asyncio.gather(*((one, two)[i % 2].resume(opened) for i in range(10)))  # with the oldest ticket
    assert grows(sorted(ranges(opened, *before, *after)))


async def test_epochs_still_grow_when_redis_lost_everything_and_its_clock_is_behind(coordinator, redis):
    await coordinator.join("v1")
    opened = await coordinator.open()
    future = opened.primary.epoch_last + 3_600 * 10**6  # as if an hour of this clock had been taken back
    ahead = await coordinator.resume(opened, last_epoch=future)
    redis.stop()
    redis.start()
    await coordinator.join("v1")
    after = await coordinator.resume(ahead)  # the ticket alone carries the greatest epoch
    assert grows(ranges(ahead, after))


async def test_a_resume_avoids_the_verifier_that_failed(coordinator):
    for i in range(1, 4):
        await coordinator.join(f"v{i}")
    for _ in range(5):
        opened = await coordinator.open()
        lost = opened.primary.verifier_id
        resumed = await coordinator.resume(opened, failed_verifiers=[lost])
        assert lost not in (resumed.primary.verifier_id, resumed.standby.verifier_id)


@pytest.mark.parametrize("changed", ["weights_hash", "tokenizer_hash"])
async def test_a_session_never_moves_to_other_weights_or_another_tokenizer(coordinator, refused, changed):
    await coordinator.join("v1")
    opened = await coordinator.open()
    await coordinator.registry.Deregister(pb.DeregisterRequest(verifier_id="v1", instance=1))
    await coordinator.join("v2", target=identity(**{changed: "sha256:other"}))
    error = await refused(coordinator.resume(opened))
    assert isinstance(error, Unavailable)
    assert "sha256:w" in str(error)


async def test_the_standbys_ticket_proves_ownership_as_well(coordinator):
    await coordinator.join("v1")
    await coordinator.join("v2")
    opened = await coordinator.open()
    assert coordinator.read(opened.standby).audience == opened.standby.verifier_id
    resumed = await coordinator.resume(opened, ticket=opened.standby.ticket)
    assert grows(ranges(opened, resumed))


async def test_an_expired_ticket_still_resumes_its_session_and_not_for_ever(start, refused):
    lasting = await start(ticket_ttl_s=1e-3)
    await lasting.join("v1")
    opened = await lasting.open()

    async def expired():
        return time.time() > opened.expires_unix

    await until(expired)
    with pytest.raises(Unauthenticated, match="expired"):
        lasting.read(opened.primary)
    await lasting.resume(opened)
    strict = await start(ticket_ttl_s=1e-3, resume_grace_s=0.0)
    assert isinstance(await refused(strict.resume(opened)), Unauthenticated)


async def test_a_ticket_of_another_session_resumes_and_closes_nothing(coordinator, refused):
    await coordinator.join("v1")
    mine, yours = await coordinator.open(), await coordinator.open()
    error = await refused(coordinator.resume(mine, ticket=yours.primary.ticket))
    assert isinstance(error, PermissionDenied)
    assert repr(mine.session_id[:8]) in str(error)
    assert mine.session_id not in str(error)
    assert yours.session_id not in str(error)
    order = pb.CloseSessionRequest(session_id=mine.session_id, ticket=yours.primary.ticket)
    assert isinstance(await refused(coordinator.sessions.CloseSession(order)), PermissionDenied)


async def test_a_forged_ticket_resumes_nothing(coordinator, refused):
    await coordinator.join("v1")
    opened = await coordinator.open()
    forged = bytearray(opened.primary.ticket)
    forged[10] ^= 1
    assert isinstance(await refused(coordinator.resume(opened, ticket=bytes(forged))), Unauthenticated)
