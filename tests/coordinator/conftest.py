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


@pytest.fixture
def redis():
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def config(redis, tmp_path) -> Callable[..., CoordinatorConfig]:
    """Return a factory of coordinators' configurations over this test's Redis, by default with one state folder."""

    def make(**changes: object) -> CoordinatorConfig:
        settings = {
            "listen": "127.0.0.1:0",
            "redis": redis.url,
            "state_dir": Path(tmp_path) / "state",
            "watch_interval_s": 0.05,
            "store_timeout_s": 10.0,  # a busy machine takes its time
            "stop_grace_s": 0.2,
            **changes,
        }
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
