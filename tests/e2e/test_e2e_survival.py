"""Test that processes die, stop and leave in mid-session and the client gets every token once, in order, unchanged."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from system import Device, children_of, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
GREEDY = {"max_tokens": 240, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "seed": 11}
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
EARLY = 40
SHORT = 5


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Return the undisturbed outputs by their options, generated when needed."""
    return {}


async def undisturbed(system, device, expected, options) -> list[int]:
    key = str(sorted(options.items()))
    if key not in expected:
        expected[key] = (await device.run(system.here, PROMPT, **options))["tokens"]
    return expected[key]


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


async def test_a_verifier_killed_outright_costs_nothing_but_a_moment(settled, device, expected):
    whole = await undisturbed(settled, device, expected, SAMPLED)
    running = await device.begin(settled.here, PROMPT, **SAMPLED)
    await running.until_tokens(EARLY)
    victim = settled.verifier_at(running.attaches[0])
    killed = now()
    victim.signal_group(signal.SIGKILL)
    done = await running.done()
    settled.replace_in_background()
    assert done["tokens"] == whole
    assert done["attaches"] >= 2
    assert running.attaches[-1] != victim.address
    assert min(at for at in running.times if at > killed) - killed < 5.0


async def test_a_verifier_killed_at_any_step_of_a_short_output_changes_no_token(settled, device, expected):
    options = {**SAMPLED, "max_tokens": SHORT}
    whole = await undisturbed(settled, device, expected, options)
    for received in range(SHORT):
        running = await device.begin(settled.here, PROMPT, **options)
        await running.until_attached()
        await running.until_tokens(received)
        settled.verifier_at(running.attaches[-1]).signal_group(signal.SIGKILL)
        settled.replace_in_background()
        assert (await running.done())["tokens"] == whole, f"killed after {received} tokens"
        await settled.settled()


async def test_also_while_the_coordinator_does_not_answer(settled, device, expected):
    whole = await undisturbed(settled, device, expected, GREEDY)
    running = await device.begin(settled.here, PROMPT, **GREEDY)
    await running.until_tokens(EARLY)
    settled.coordinator.signal_group(signal.SIGSTOP)
    try:
        settled.verifier_at(running.attaches[0]).signal_group(signal.SIGKILL)
        done = await running.done()
    finally:
        settled.coordinator.signal_group(signal.SIGCONT)
    settled.replace_in_background()
    assert done["tokens"] == whole
    assert done["attaches"] >= 2


async def test_a_verifier_that_stops_is_left_and_when_it_wakes_nothing_changes(settled, device, expected):
    options = {**SAMPLED, "max_tokens": 480}
    whole = await undisturbed(settled, device, expected, options)
    running = await device.begin(settled.here, PROMPT, **options)
    await running.until_tokens(EARLY)
    victim = settled.verifier_at(running.attaches[0])
    stopped = now()
    victim.signal_group(signal.SIGSTOP)
    try:
        await running.until_attaches(2)
        resumed = running.times[-1] - stopped
    finally:
        victim.signal_group(signal.SIGCONT)
    done = await running.done()
    assert done["tokens"] == whole
    assert resumed < 5.0
    await settled.settled()  # the zombie has let go of the session, and is a verifier again


async def test_a_verifier_whose_step_hangs_is_left_although_its_processes_run(settled, device, expected):
    options = {**SAMPLED, "max_tokens": 480}
    whole = await undisturbed(settled, device, expected, options)
    running = await device.begin(settled.here, PROMPT, **options)
    await running.until_tokens(EARLY)
    [engine] = children_of(settled.verifier_at(running.attaches[0]).pid)
    hung = now()
    os.kill(engine, signal.SIGUSR1)
    await running.until_attaches(2)
    resumed = running.times[-1] - hung
    assert (await running.done())["tokens"] == whole
    assert resumed < 5.0
    await settled.settled()  # once the step goes on the session is freed


async def test_a_device_that_was_stopped_goes_on_at_its_verifier(settled, device, expected):
    options = {**SAMPLED, "max_tokens": 480}
    whole = await undisturbed(settled, device, expected, options)
    running = await device.begin(settled.here, PROMPT, **options)
    await running.until_tokens(EARLY)
    device.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(4.0)
    finally:
        device.process.send_signal(signal.SIGCONT)
    done = await running.done()
    assert done["tokens"] == whole
    assert done["attaches"] == 1


async def test_the_engines_death_ends_the_verifier_and_not_the_session(settled, device, expected):
    whole = await undisturbed(settled, device, expected, GREEDY)
    running = await device.begin(settled.here, PROMPT, **GREEDY)
    await running.until_tokens(EARLY)
    victim = settled.verifier_at(running.attaches[0])
    [engine] = children_of(victim.pid)
    os.kill(engine, signal.SIGKILL)
    assert (await running.done())["tokens"] == whole
    assert await asyncio.wait_for(victim.wait(), 10) == 3
    settled.replace_in_background()


async def test_sigterm_lets_a_session_finish_and_ends_with_0(settled, device, expected):
    whole = await undisturbed(settled, device, expected, GREEDY)
    running = await device.begin(settled.here, PROMPT, **GREEDY)
    await running.until_tokens(EARLY)
    leaving = settled.verifier_at(running.attaches[0])
    leaving.signal_group(signal.SIGTERM)  # as a supervisor does: front and engine alike
    done = await running.done()
    assert done["tokens"] == whole
    assert done["attaches"] == 1
    assert await asyncio.wait_for(leaving.wait(), 15) == 0
    assert "Traceback" not in (settled.folder / "logs" / f"{leaving.name}.log").read_text()
    # Nobody is placed there any more, long before its lease would have ended.
    assert leaving.address not in {v.address for v in (await settled.status()).verifiers}
    settled.replace_in_background()


async def test_a_session_goes_on_without_coordinator_and_store(settled, device, expected):
    whole = await undisturbed(settled, device, expected, GREEDY)
    running = await device.begin(settled.here, PROMPT, **GREEDY)
    await running.until_tokens(EARLY)
    settled.coordinator.signal_group(signal.SIGKILL)  # its embedded Redis goes with it
    done = await running.done()
    assert done["tokens"] == whole
    assert done["attaches"] == 1
    await settled.restart_coordinator()
    await settled.settled()
    assert (await device.run(settled.here, PROMPT, **GREEDY))["tokens"] == whole


async def test_a_session_goes_on_while_redis_dies_and_new_ones_come_after_it(settled, device, expected):
    whole = await undisturbed(settled, device, expected, GREEDY)
    running = await device.begin(settled.here, PROMPT, **GREEDY)
    await running.until_tokens(EARLY)
    [redis] = children_of(settled.coordinator.pid)
    os.kill(redis, signal.SIGKILL)
    assert (await running.done())["tokens"] == whole
    await settled.settled()
    assert (await device.run(settled.here, PROMPT, **GREEDY))["tokens"] == whole


async def test_a_cancel_frees_everything_at_the_verifier(settled, device):
    running = await device.begin(settled.here, PROMPT, **LONG)
    await running.until_tokens(EARLY)
    await settled.until_status(holding)
    await running.cancel()
    done = await running.done()
    assert done["finish"] == "cancelled"
    assert EARLY <= len(done["tokens"]) < LONG["max_tokens"]
    await settled.until_status(lambda status: not holding(status), timeout_s=3.0)
    await settled.until_status(
        lambda status: done["session"] not in {s.telemetry.session_id for s in status.sessions}, timeout_s=3.0
    )


async def test_a_device_that_is_killed_frees_everything_at_the_verifier(settled, folder):
    async with Device.start(folder / "cache") as doomed:
        running = await doomed.begin(settled.here, PROMPT, **LONG)
        await running.until_tokens(EARLY)
        await settled.until_status(holding)
        doomed.process.kill()
        await until(lambda: doomed.process.returncode is not None)
        assert len(running.tokens) < LONG["max_tokens"]
    await settled.until_status(lambda status: not holding(status), timeout_s=5.0)


def holding(status) -> bool:
    """Return whether any verifier reports that it holds tokens."""
    return any(verifier.telemetry.kv_used for verifier in status.verifiers)
