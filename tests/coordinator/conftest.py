"""Start a real Redis-compatible server and real coordinators on real sockets."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from peers import Peer

from coordinator.api import ticket_key
from coordinator.api.server import running
from coordinator.config import CoordinatorConfig
from coordinator.store.embedded_redis import EmbeddedServer
from outrider.wire import channels

CONSTANTS = {
    "attach_grace_ms": "coordinator.store.sessions",
    "defaults": "coordinator.store.quotas",
    "lease_ms": "coordinator.config",
    "resume_grace_s": "coordinator.api.devices",
    "stop_grace_s": "coordinator.api.server",
    "ticket_ttl_s": "coordinator.api.devices",
    "timeout_s": "coordinator.store.redis_store",
    "watch_s": "coordinator.api.server",
}
"""Constants that a test may give as if they were settings, by their modules."""


@pytest.fixture
def redis():
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def config(redis, tmp_path, monkeypatch) -> Callable[..., CoordinatorConfig]:
    """Return a factory of coordinators' configurations over this test's Redis, by default with one state folder.

    It takes constants, too, which then hold for all coordinators of the test.
    """

    def make(**changes: object) -> CoordinatorConfig:
        # A busy machine takes its time for a command of Redis, and for a test between two reports.
        unhurried = {"timeout_s": 60.0, "lease_ms": 60_000}
        for name, value in {"watch_s": 0.05, "stop_grace_s": 0.2, **unhurried, **changes}.items():
            if name in CONSTANTS:
                monkeypatch.setattr(f"{CONSTANTS[name]}.{name.upper()}", value)
                changes.pop(name, None)
        settings = {"listen": "127.0.0.1:0", "redis": redis.url, "state_dir": Path(tmp_path) / "state", **changes}
        return CoordinatorConfig(**settings)

    return make


@pytest.fixture
async def start(config):
    """Return a function that starts a coordinator with these settings; all stop with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_one(**changes: object) -> Peer:
            settings = config(**changes)
            address = await stack.enter_async_context(running(settings))
            channel = await stack.enter_async_context(channels.channel(address))
            peer = Peer(address, channel)
            peer.public_keys |= ticket_key.load(settings).public_keys
            return peer

        yield start_one


@pytest.fixture
async def coordinator(start) -> Peer:
    """Start a coordinator with the defaults."""
    return await start()


@pytest.fixture
def refused():
    """Await a call that must fail, and return the core error that it carries."""
    from outrider.wire.status import error_from_rpc

    async def expect(call):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return error_from_rpc(caught.value)

    return expect
