"""Test that sessions are placed within capacity, preferably near and idle rather than far and busy."""

import asyncio
import collections
import random

from peers import identity, until

from coordinator import placement
from coordinator.api import devices
from coordinator.store.sessions import CANDIDATES_AT_ONCE
from outrider.core.errors import BadRequest, NotFound, OutriderError, Overloaded, Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.checks import limits_of
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import Target


def verifier(verifier_id, **target):
    names = {"name": "demo", "weights_hash": "w", "tokenizer_hash": "t", "dtype": "float32", **target}
    return verifier_id, Target(**names)


async def attempt(call):
    try:
        return await call
    except Exception as error:
        return error_from_rpc(error)


async def test_fifty_concurrent_opens_over_two_coordinators_fill_every_place_and_no_more(start):
    one, two = await start(), await start()
    capacity = {"v1": 7, "v2": 11, "v3": 5}
    for verifier_id, places in capacity.items():
        await one.join(verifier_id, capacity=places)
    outcomes = await asyncio.gather(*(attempt((one, two)[i % 2].open()) for i in range(50)))
    placed = [o for o in outcomes if not isinstance(o, OutriderError)]
    turned_away = [o for o in outcomes if isinstance(o, OutriderError)]
    assert collections.Counter(o.primary.verifier_id for o in placed) == capacity
    assert len({o.session_id for o in placed}) == 23
    assert {type(error) for error in turned_away} == {Overloaded}
    assert all(error.retry_after_s > 0 and "full, draining or cordoned" in str(error) for error in turned_away)


async def test_without_any_verifier_a_device_is_told_when_to_ask_again_and_for_another_target_it_is_not(
    coordinator, refused
):
    error = await refused(coordinator.open())
    assert isinstance(error, Unavailable) and error.retry_after_s == 1.0
    await coordinator.join("v1")
    error = await refused(coordinator.open(target="another"))
    assert isinstance(error, NotFound) and not error.retry_after_s


async def test_a_report_that_was_on_its_way_does_not_bring_a_closed_session_back(coordinator):
    await coordinator.join("v1", capacity=1)
    opened = await coordinator.open()
    await coordinator.close(opened)
    assert (await coordinator.report("v1", [opened.session_id])).known
    assert not (await coordinator.placed())
    await coordinator.report("v1")
    await coordinator.open()


async def test_the_place_of_a_device_that_never_attaches_is_free_again(start):
    coordinator = await start(attach_grace_ms=150)
    await coordinator.join("v1", capacity=1)

    async def room():
        return not isinstance(await attempt(coordinator.open()), OutriderError)

    async def full():
        return not await room()

    await until(full)  # at the second session, unless a busy machine takes longer than the first one's place is kept
    await until(room)


async def test_a_session_keeps_its_place_while_it_is_reported_and_loses_it_after(start):
    coordinator = await start(lease_ms=300, report_interval_ms=50, attach_grace_ms=100)
    await coordinator.join("v1", capacity=1)
    await coordinator.join("v2", capacity=1)
    kept = await coordinator.open()
    dropped = await coordinator.open()
    await coordinator.report(dropped.primary.verifier_id, [dropped.session_id])

    async def only_the_dropped_ones_place_is_free():
        for opened, sessions in ((kept, [kept.session_id]), (dropped, [])):
            if not (await coordinator.report(opened.primary.verifier_id, sessions)).known:
                await coordinator.join(
                    opened.primary.verifier_id, capacity=1
                )  # a busy machine was later than the lease
        first, second = await attempt(coordinator.open()), await attempt(coordinator.open())
        return (
            not isinstance(first, OutriderError)
            and first.primary.verifier_id == dropped.primary.verifier_id
            and isinstance(second, Overloaded)
        )

    await until(only_the_dropped_ones_place_is_free)


async def test_sessions_that_only_the_verifier_knows_of_count_too(coordinator, refused):
    await coordinator.join("v1", capacity=2)
    await coordinator.report("v1", ["left-over-1", "left-over-2"])
    assert isinstance(await refused(coordinator.open()), Overloaded)


async def test_a_draining_verifier_gets_nothing_new(coordinator, refused):
    await coordinator.join("v1")
    await coordinator.join("v2")
    await coordinator.report("v1", draining=True)
    assert {(await coordinator.open()).primary.verifier_id for _ in range(6)} == {"v2"}
    await coordinator.report("v2", draining=True)
    assert isinstance(await refused(coordinator.open()), Overloaded)


async def test_of_two_the_less_loaded_is_taken(coordinator):
    await coordinator.join("v1", capacity=10)
    await coordinator.join("v2", capacity=100)
    await coordinator.report("v1", [f"busy-{i}" for i in range(5)])
    chosen = [(await coordinator.open()).primary.verifier_id for _ in range(10)]
    assert chosen == ["v2"] * 10


async def test_a_standby_is_another_verifier_of_the_same_weights(coordinator):
    await coordinator.join("v1")
    await coordinator.join("v2", target=identity(weights_hash="sha256:other"))
    await coordinator.join("v3", target=identity(hardware="h200"))
    for _ in range(12):
        opened = await coordinator.open(target="demo")
        expected = {"v1": "v3", "v3": "v1", "v2": ""}
        assert opened.standby.verifier_id == expected[opened.primary.verifier_id]


async def test_a_full_verifier_is_no_standby_and_a_standby_costs_no_place(coordinator):
    await coordinator.join("v1", capacity=1)
    await coordinator.join("v2", capacity=1)
    first = await coordinator.open()
    assert first.HasField("standby")
    second = await coordinator.open()
    assert second.primary.verifier_id == first.standby.verifier_id
    assert not second.HasField("standby")


async def test_several_targets_need_a_name_and_one_does_not(coordinator, refused):
    await coordinator.join("v1")
    assert (await coordinator.open()).target.name == "demo"
    await coordinator.join("v2", target=identity(name="other", weights_hash="sha256:x"))
    error = await refused(coordinator.open())
    assert isinstance(error, BadRequest)
    assert "'demo', 'other'" in str(error)
    assert error.field == "target"
    assert (await coordinator.open(target="other")).primary.verifier_id == "v2"


async def test_a_grant_tells_the_device_where_to_go_and_the_verifier_what_to_allow(start):
    coordinator = await start()
    await coordinator.join("v1", tls=True)
    opened = await coordinator.open()
    claims = coordinator.read(opened.primary)
    assert (opened.primary.address, opened.primary.tls) == ("127.0.0.1:10001", True)
    assert (claims.session_id, claims.tenant, claims.audience) == (opened.session_id, "default", "v1")
    assert (claims.epoch_first, claims.epoch_last) == (opened.primary.epoch_first, opened.primary.epoch_last)
    assert claims.expires_unix == opened.expires_unix
    assert claims.limits == limits_of(opened.primary.limits) == SessionLimits()


async def test_more_verifiers_than_one_step_looks_at_are_all_used(coordinator):
    count = CANDIDATES_AT_ONCE + 8
    for i in range(1, count + 1):
        await coordinator.join(f"v{i}", capacity=1)
    opened = await asyncio.gather(*(coordinator.open() for _ in range(count)))
    assert len({o.primary.verifier_id for o in opened}) == count


def test_candidates_come_in_random_order_and_those_that_failed_last():
    others = verifier("x", name="y"), verifier("z", weights_hash="v")
    fleet = dict([verifier("one"), verifier("lost"), verifier("two"), *others])
    wanted = Target("demo", "w", "t")
    ranked = placement.candidates(fleet, wanted, {"lost"}, random.Random(1))
    assert ranked == placement.candidates(fleet, wanted, {"lost"}, random.Random(1))
    assert set(ranked[:3]) == {"one", "two", "x"}
    assert ranked[3:] == ["lost"]


async def test_sessions_wait_a_second_for_their_turn_to_be_placed_and_then_are_sent_away(start, monkeypatch):
    monkeypatch.setattr(devices, "PLACED_AT_ONCE", 1)
    goes_on, placed = asyncio.Event(), devices.CoordinatorServicer._placed

    async def slowly(own, claims, *request):
        if not claims.epoch_last:
            await goes_on.wait()
        return await placed(own, claims, *request)

    coordinator = await start()
    await coordinator.join("v1")
    running = await coordinator.open()
    monkeypatch.setattr(devices.CoordinatorServicer, "_placed", slowly)
    tasks = [asyncio.create_task(attempt(coordinator.open())) for _ in range(5)]
    while sum(task.done() for task in tasks) < 2:
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    errors = [task.result() for task in tasks if task.done()]
    assert {type(error) for error in errors} == {Overloaded}
    assert all(error.retry_after_s == 1.0 and "more sessions wait to be placed than" in str(error) for error in errors)
    assert (await coordinator.report("v1")).known  # reports do not wait, nor do sessions that run
    assert (await coordinator.resume(running)).primary.verifier_id == "v1"
    while sum(task.done() for task in tasks) < 4:
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    goes_on.set()
    opened = [one for one in await asyncio.gather(*tasks) if not isinstance(one, OutriderError)]
    assert [one.primary.verifier_id for one in opened] == ["v1"]
