"""Test operators' commands on a cluster whose coordinator, verifiers and devices are real."""

from __future__ import annotations

import asyncio
import json
import operator
import sys
import time

import pytest
import pytest_asyncio
from system import ROOT, Failed, System

from outrider.wire.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "class Stack:\n    def __init__(self):\n"
OPTIONS = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0.8, "seed": 4}
EARLY = 30


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(hasty):
    """Return the system with two verifiers that are registered and hold nothing."""
    await hasty.settled()
    return hasty


async def outrider(system, *arguments: str) -> tuple[int, str, str]:
    """Run the operator's command; return exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coordinator.cli", *arguments, "--coordinator", system.cluster.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, out.decode(), err.decode()


async def asked(system, *arguments: str) -> dict:
    code, out, err = await outrider(system, *arguments, "-o", "json")
    assert code == 0, err
    return json.loads(out)


async def begun(system, device, **where):
    """Begin a request; return it, and its session as the coordinator shows it."""
    running = await device.begin({**system.here, **where}, PROMPT, **OPTIONS)
    await running.until_tokens(EARLY)
    found: list[pb.SessionStatus] = []

    def alone(status: pb.StatusResponse) -> bool:
        found[:] = status.sessions
        return len(found) == 1 and found[0].telemetry.committed > 0

    await system.until_status(alone)
    return running, found[0]


async def goes_on(running) -> None:
    """Wait for a token that was committed after now."""
    now = time.monotonic()
    while running.times[-1] <= now:
        await running.until_tokens(len(running.tokens) + 1)


async def test_a_live_session_is_shown_with_its_verifier_and_what_it_does(cluster, device):
    running, session = await begun(cluster, device)
    verifier = await asked(cluster, "verifiers", "show", session.verifier_id)
    assert verifier["address"] == running.attaches[0]
    assert verifier["sessions"] == 1
    shown = await asked(cluster, "sessions", "show", session.telemetry.session_id)
    assert shown["standby"] not in (None, session.verifier_id)
    assert shown["draft"]
    code, out, _ = await outrider(cluster, "top", "--once")
    assert code == 0
    assert session.telemetry.session_id in out
    await running.cancel()
    await running.done()


async def test_a_cordoned_verifier_finishes_what_it_has_and_gets_nothing_new(cluster, device):
    running, session = await begun(cluster, device)
    assert (await outrider(cluster, "verifiers", "cordon", session.verifier_id))[0] == 0
    await asyncio.sleep(0.5)  # five reports
    assert (await asked(cluster, "verifiers", "show", session.verifier_id))["state"] == "cordoned"
    for _ in range(3):
        other = await device.begin(cluster.here, PROMPT, max_tokens=4)
        await other.done()
        assert other.attaches[0] != running.attaches[0]
    await goes_on(running)
    await running.cancel()
    assert (await running.done())["attaches"] == 1
    assert (await outrider(cluster, "verifiers", "uncordon", session.verifier_id))[0] == 0
    assert (await asked(cluster, "verifiers", "show", session.verifier_id))["state"] == "serving"


async def test_a_killed_session_ends_with_a_final_error_at_once_and_its_place_is_free(cluster, device):
    running, session = await begun(cluster, device)
    killed = time.monotonic()
    assert (await outrider(cluster, "sessions", "kill", session.telemetry.session_id))[0] == 0
    with pytest.raises(Failed, match="operator") as caught:
        await running.done()
    assert caught.value.kind == "Killed"
    assert len(running.places) == 1  # nowhere else did it try
    assert len(running.attaches) <= 2
    assert time.monotonic() - killed < 10.0
    loads = operator.attrgetter("telemetry.live_sessions", "telemetry.kv_used")
    await cluster.until_status(lambda s: not s.sessions and not any(any(loads(v)) for v in s.verifiers))
    assert (await outrider(cluster, "sessions", "show", session.telemetry.session_id))[0] == 3
    await device.run(cluster.here, PROMPT, max_tokens=4)  # another one may come


async def test_tenants_come_and_go_while_the_cluster_runs(pair, tmp_path, device):
    async with System(tmp_path, pair, count=1) as fresh:
        await fresh.settled()
        code, key, _ = await outrider(fresh, "tenants", "create", "acme")
        assert code == 0
        acme = {**fresh.here, "api_key": key.strip()}
        with pytest.raises(Failed, match="API key is missing"):
            await device.run(fresh.here, PROMPT, max_tokens=4)
        running, session = await begun(fresh, device, **acme)
        assert session.telemetry.tenant == "acme"
        [listed] = (await asked(fresh, "sessions", "list", "--tenant", "acme"))["sessions"]
        assert listed["id"] == session.telemetry.session_id
        revoked = time.monotonic()
        assert (await outrider(fresh, "tenants", "revoke", "acme"))[0] == 0
        with pytest.raises(Failed, match="unknown here") as caught:
            await device.run(acme, PROMPT, max_tokens=4)
        assert caught.value.kind == "Unauthenticated"
        assert time.monotonic() - revoked < 10.0
        with pytest.raises(Failed) as ended:
            await running.done()
        assert ended.value.kind == "Unauthenticated"
        assert running.tokens  # what it had is delivered
        assert time.monotonic() - revoked < 10.0


async def test_tokens_beyond_a_tenants_limit_keep_its_next_session_out_until_the_limit_is_lifted(
    pair, tmp_path, device
):
    async with System(tmp_path, pair, count=1) as fresh:
        await fresh.settled()
        _, key, _ = await outrider(fresh, "tenants", "create", "acme", "--tokens-per-minute", "20")
        acme = {**fresh.here, "api_key": key.strip()}
        await device.run(acme, PROMPT, max_tokens=64, ignore_eos=True)  # a live session finishes

        async def counted() -> int:
            [listed] = (await asked(fresh, "tenants", "list"))["tenants"]
            return listed["use"]["tokens"]

        give_up = time.monotonic() + 30.0
        while await counted() <= 20:
            assert time.monotonic() < give_up
        with pytest.raises(Failed, match="more than its 20 tokens per minute") as caught:
            await device.run(acme, PROMPT, max_tokens=4)
        assert caught.value.kind == "Overloaded"
        assert (await outrider(fresh, "tenants", "set", "acme", "--tokens-per-minute", "0"))[0] == 0
        await device.run(acme, PROMPT, max_tokens=4)


async def test_a_drain_moves_sessions_without_a_loss_ends_the_process_and_leaves_its_id_cordoned(cluster, device):
    whole = (await device.run(cluster.here, PROMPT, **OPTIONS))["tokens"]
    running, session = await begun(cluster, device)
    leaving = cluster.verifier_at(running.attaches[0])
    code, out, _ = await outrider(cluster, "verifiers", "drain", session.verifier_id)
    assert code == 0
    assert "and ends" in out
    done = await running.done()
    assert done["tokens"] == whole
    assert done["attaches"] == len(running.attaches) <= 3
    assert running.places[0] == leaving.address and len(running.places) == 2
    assert await asyncio.wait_for(leaving.wait(), 10) == 0
    # What is started under its id next serves, and gets nothing before it is uncordoned.
    again = await cluster.start_verifier("--verifier-id", session.verifier_id)
    assert (await asked(cluster, "verifiers", "show", session.verifier_id))["state"] == "cordoned"
    for _ in range(3):
        other = await device.begin(cluster.here, PROMPT, max_tokens=4)
        await other.done()
        assert other.attaches[0] != again.address
    assert again.running
    assert (await outrider(cluster, "verifiers", "uncordon", session.verifier_id))[0] == 0
