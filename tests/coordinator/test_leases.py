"""Test that a verifier is registered for as long as it reports."""

from peers import identity, until

from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry


async def test_a_registered_verifier_is_shown_with_what_it_reported(coordinator):
    await coordinator.join("v1", capacity=5, tls=True)
    await coordinator.report(
        "v1",
        ["a", "b"],
        step_ms=12.5,
        kv_used=10,
        kv_capacity=100,
        tokens_per_s=250.0,
        node_ms=0.5,
        timing_ms={"verify": 1.5},
        step_cost_ms={1: 10.0, 8: 12.0},
        session_cost_ms=0.25,
    )
    [shown] = await coordinator.serving()
    assert (shown.verifier_id, shown.address, shown.capacity_sessions) == ("v1", "127.0.0.1:10001", 5)
    telemetry = shown.telemetry
    assert (telemetry.live_sessions, telemetry.step_ms, telemetry.kv_used, telemetry.kv_capacity) == (2, 12.5, 10, 100)
    assert (telemetry.tokens_per_s, telemetry.node_ms) == (250.0, 0.5)
    assert dict(telemetry.timing_ms) == {"verify": 1.5}
    assert (dict(telemetry.step_cost_ms), telemetry.session_cost_ms) == ({1: 10.0, 8: 12.0}, 0.25)
    assert shown.target == identity()
    assert 0.0 < shown.lease_s <= 60.0


async def test_reports_keep_a_verifier_beyond_its_lease(start):
    coordinator = await start(lease_ms=300, report_interval_ms=50)
    await coordinator.join("v1")
    await coordinator.join("v2")

    async def only_the_one_that_reports_is_left():
        if not (await coordinator.report("v1")).known:  # a busy machine took longer than the lease
            await coordinator.join("v1")
            await coordinator.join("v2")
        return await coordinator.alive() == {"v1"}

    await until(only_the_one_that_reports_is_left)


async def test_a_verifier_whose_lease_ended_has_to_register_again(start):
    coordinator = await start(lease_ms=100, report_interval_ms=50)
    await coordinator.join("v1")

    async def gone():
        return not await coordinator.alive()

    await until(gone)
    assert not (await coordinator.report("v1")).known


async def test_a_restarted_verifier_replaces_its_former_self_and_its_sessions(coordinator, refused):
    await coordinator.join("v1", capacity=1, instance=1)
    await coordinator.open()
    await coordinator.join("v1", capacity=1, instance=2)
    assert not (await coordinator.report("v1", instance=1)).known
    assert (await coordinator.report("v1", instance=2)).known
    await coordinator.open()  # the placement of the first session died with the first instance


async def test_registering_again_keeps_the_placements_of_the_same_instance(coordinator, refused):
    await coordinator.join("v1", capacity=1)
    await coordinator.open()
    await coordinator.join("v1", capacity=1)
    assert "full" in str(await refused(coordinator.open()))


async def test_a_former_instance_cannot_remove_its_successor(coordinator):
    await coordinator.join("v1", instance=1)
    await coordinator.join("v1", instance=2)
    await coordinator.registry.Deregister(pb.DeregisterRequest(verifier_id="v1", instance=1))
    assert await coordinator.alive() == {"v1"}


async def test_a_session_that_has_not_attached_yet_is_shown_where_it_was_placed(coordinator):
    await coordinator.join("v1")
    opened = await coordinator.open()
    [shown] = await coordinator.placed()
    telemetry = shown.telemetry
    assert (telemetry.session_id, telemetry.tenant, shown.verifier_id) == (opened.session_id, "default", "v1")
    assert telemetry.committed == 0


async def test_a_zombies_report_does_not_hide_the_owner_of_a_greater_epoch(coordinator):
    await coordinator.join("v1")
    await coordinator.join("v2")
    await coordinator.report("v2", [SessionTelemetry(session_id="s", epoch=1_000, steps=1, committed=50)])
    await coordinator.report("v1", [SessionTelemetry(session_id="s", epoch=999, steps=1, committed=40)])
    shown = {(s.verifier_id, s.telemetry.committed) for s in (await coordinator.placed())}
    assert shown == {("v2", 50)}


async def test_a_thousand_sessions_in_one_report_are_kept(coordinator):
    await coordinator.join("v1", capacity=2_000)
    await coordinator.report("v1", [f"s{i}" for i in range(1_000)])
    assert len(await coordinator.placed()) == 1_000


async def test_restarts_are_those_of_processes_that_did_not_leave_in_order(coordinator):
    async def restarts_after(instance: int) -> int:
        await coordinator.join("v1", instance=instance)
        [shown] = await coordinator.serving()
        return shown.restarts

    assert [await restarts_after(instance) for instance in (1, 1, 2, 3, 3)] == [0, 0, 1, 2, 2]
    await coordinator.registry.Deregister(pb.DeregisterRequest(verifier_id="v1", instance=3))
    assert await restarts_after(4) == 0


async def test_a_verifier_that_went_without_a_word_is_lost_until_it_is_back(start):
    coordinator = await start(lease_ms=100, report_interval_ms=50)
    await coordinator.join("v1")
    await coordinator.join("v2")
    await coordinator.registry.Deregister(pb.DeregisterRequest(verifier_id="v2", instance=1))

    async def lost():
        return (await coordinator.admin.ListVerifiers(pb.ListVerifiersRequest())).lost_s

    async def back():
        await coordinator.join("v1", instance=2)
        return not await lost()

    await until(lost)
    assert (await lost()).keys() == {"v1"}
    await until(back)
