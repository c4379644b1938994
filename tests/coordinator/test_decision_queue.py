"""Test that decisions are made beside the reports that ask for them."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.records import Decisions
from coordinator.window.decision_queue import STALE_S, DecisionQueue

NONE = Decisions()


def of(session_id: str) -> Decisions:
    return Decisions(session_id, session_id.encode(), 1.0)


async def at_once(session_id: str) -> Decisions:
    return of(session_id)


async def test_a_decision_made_in_time_goes_out_with_the_report_that_asked() -> None:
    assert await DecisionQueue().decide("v", lambda: at_once("s")) == of("s")


async def test_a_late_decision_goes_out_with_the_next_report_and_until_there_is_a_newer_one() -> None:
    deciding, gate = DecisionQueue(wait_s=0.02), asyncio.Event()

    async def late() -> Decisions:
        await gate.wait()
        return of("late")

    assert await deciding.decide("v", late) == NONE
    gate.set()
    await asyncio.sleep(0.01)  # it ends between two reports

    async def never() -> Decisions:
        return await asyncio.sleep(60.0, of("never"))

    for _ in range(2):
        assert await deciding.decide("v", never) == of("late")


async def test_a_decision_that_had_to_wait_for_its_turn_is_made_from_the_last_report() -> None:
    deciding, gate = DecisionQueue(wait_s=0.02), asyncio.Event()

    async def long() -> Decisions:
        await gate.wait()
        return of("long")

    assert deciding.waiting == 0
    assert await deciding.decide("another", long) == NONE
    assert await deciding.decide("v", lambda: at_once("first")) == NONE
    waiting = asyncio.create_task(deciding.decide("v", lambda: at_once("second")))
    await asyncio.sleep(0)
    assert deciding.waiting == 2
    gate.set()
    await waiting
    await asyncio.sleep(0.01)
    assert await deciding.decide("v", lambda: asyncio.sleep(60.0, NONE)) == of("second")


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_only_so_many_are_under_way_over_all_verifiers(elsewhere: bool) -> None:
    deciding, under_way, most = DecisionQueue(at_once=3), 0, 0

    async def slow() -> Decisions:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return of("s")

    each = (deciding.decide(f"v{i}", slow, elsewhere=elsewhere) for i in range(7))
    assert await asyncio.gather(*each) == [of("s")] * 7
    assert most == (3 if elsewhere else 1)


async def test_what_is_decided_here_keeps_no_turn_of_what_is_decided_elsewhere() -> None:
    deciding, gate = DecisionQueue(wait_s=0.5, at_once=1), asyncio.Event()

    async def long() -> Decisions:
        await gate.wait()
        return of("long")

    waiting = [asyncio.create_task(deciding.decide(f"v{i}", long)) for i in range(3)]
    assert await deciding.decide("large", lambda: at_once("s"), elsewhere=True) == of("s")
    gate.set()
    await asyncio.gather(*waiting)


async def test_a_decision_that_fails_delays_no_other_verifier_and_is_tried_again() -> None:
    deciding = DecisionQueue()

    async def fails() -> Decisions:
        raise RuntimeError("the store is away")

    assert await deciding.decide("v", fails) == NONE
    assert await deciding.decide("v", lambda: at_once("s")) == of("s")


async def test_a_decision_of_long_ago_is_delivered_to_nobody() -> None:
    now, gate = 0.0, asyncio.Event()
    deciding = DecisionQueue(wait_s=0.01, clock=lambda: now)

    async def late() -> Decisions:
        await gate.wait()
        return of("old")

    assert await deciding.decide("v", late) == NONE
    gate.set()
    await asyncio.sleep(0.01)
    now = STALE_S + 1.0
    assert await deciding.decide("v", lambda: asyncio.sleep(60.0, NONE)) == NONE


async def test_decisions_are_kept_while_the_next_ones_are_made_and_those_that_hold_are_delivered() -> None:
    kept, gate = [], asyncio.Event()

    async def keep(verifier_id: str, made: Decisions) -> Decisions:
        kept.append((verifier_id, made))
        if verifier_id == "slow":
            await gate.wait()
        return of("another coordinator's")

    deciding = DecisionQueue(wait_s=1.0, keep=keep)
    slow = asyncio.create_task(deciding.decide("slow", lambda: at_once("mine")))
    await asyncio.sleep(0)
    assert await deciding.decide("v", lambda: at_once("mine")) == of("another coordinator's")
    gate.set()
    assert await slow == deciding.last("slow") == of("another coordinator's")
    assert kept == [("slow", of("mine")), ("v", of("mine"))]
