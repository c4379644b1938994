"""Test a live session's window: it is decided by measurements, shown, pinned, and changes no text."""

from __future__ import annotations

import asyncio
import sys

import pytest
from system import ROOT

from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
OPTIONS = {"max_tokens": 1200, "ignore_eos": True}


async def outrider(system, *arguments: str) -> tuple[int, str]:
    """Run the operator's command; return exit code and stdout."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coordinator.cli", *arguments, "--coordinator", system.cluster.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def windows(system) -> list[pb.WindowDecision]:
    async with channel(system.cluster.address) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)
        return list((await admin.ListWindows(pb.ListWindowsRequest(), timeout=3.0)).windows)


async def until_decided(system, wanted) -> pb.WindowDecision:
    async with asyncio.timeout(20):
        while True:
            if found := [window for window in await windows(system) if wanted(window)]:
                return found[0]
            await asyncio.sleep(0.02)


async def test_a_session_is_steered_by_what_was_measured_and_says_why(settled, device):
    running = await device.begin(settled.here, PROMPT, **OPTIONS)
    decided = await until_decided(settled, lambda window: window.observations >= 24)
    assert decided.rtt_ms > 0.0
    assert decided.reason
    code, shown = await outrider(settled, "window", "show", decided.session_id)
    assert (code, decided.session_id in shown) == (0, True)
    await running.cancel()
    await running.done()
    code, shown = await outrider(settled, "window", "show", "nobody")
    assert (code, "no window is decided" in shown) == (3, True)


async def test_an_operators_pin_holds_for_all_until_it_is_lifted(settled, device):
    # Pinned and sampled: of a free window, or of a text that repeats itself, the verifier's sources may draft most.
    sampled = {**OPTIONS, "temperature": 1.0, "seed": 7}
    assert (await outrider(settled, "window", "pin", "--all", "--k", "2", "--depth", "4"))[0] == 0
    whole = await device.run(settled.here, PROMPT, **sampled)
    assert (await outrider(settled, "window", "pin", "--all", "--k", "0", "--depth", "0"))[0] == 0
    running = await device.begin(settled.here, PROMPT, **sampled)
    await until_decided(settled, lambda window: window.reason == "pinned by the operator" and window.window.k == 0)
    done = await running.done()
    assert done["tokens"] == whole["tokens"]
    assert done["evaluated"] < 0.5 * whole["evaluated"]  # it streamed but for its beginning
    assert (await outrider(settled, "window", "lift", "--all"))[0] == 0
    running = await device.begin(settled.here, PROMPT, **OPTIONS)
    await until_decided(settled, lambda window: window.reason != "pinned by the operator")
    await running.cancel()
    await running.done()


async def test_a_window_that_makes_no_sense_is_refused_with_a_reason(settled):
    code, said = await outrider(settled, "window", "set", "--all", "--k", "9", "--depth", "2")
    assert code == 2
    assert "bounds.k is 9, must be at most bounds.depth, 2" in said
