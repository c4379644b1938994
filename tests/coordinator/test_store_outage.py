"""Test that the coordinator reports a dead Redis, and goes on once it is back."""

import os
import signal

from grpc_health.v1 import health_pb2, health_pb2_grpc
from peers import until

from coordinator.store.redis_store import RedisStore, without_credentials
from outrider.core.errors import Unavailable


async def answers(call):
    try:
        await call
    except Exception:
        return False
    return True


async def serving(peer):
    stub = health_pb2_grpc.HealthStub(peer.channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service="outrider.wire.v1.Coordinator"))
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_while_redis_is_dead_every_call_is_unavailable_in_words_and_works_again_after(
    coordinator, redis, refused
):
    await coordinator.join("v1")
    opened = await coordinator.open()
    redis.stop()
    for call in (
        lambda: coordinator.open(),
        lambda: coordinator.resume(opened),
        lambda: coordinator.close(opened),
        lambda: coordinator.join("v1"),
        lambda: coordinator.report("v1"),
        lambda: coordinator.serving(),
    ):
        error = await refused(call())
        assert type(error) is Unavailable
        assert redis.url in str(error)
        assert "live sessions go on" in str(error)
    redis.start()
    assert not (await coordinator.report("v1")).known
    await coordinator.join("v1")
    assert (await coordinator.resume(opened)).primary.epoch_first > opened.primary.epoch_last


async def test_a_redis_that_hangs_is_unavailable_within_the_timeout(start, redis, refused):
    coordinator = await start(timeout_s=0.05)
    await until(lambda: answers(coordinator.join("v1")))  # a busy machine may take longer
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        assert type(await refused(coordinator.open())) is Unavailable
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    await until(lambda: answers(coordinator.open()))


async def test_the_health_service_follows_the_store(coordinator, redis):
    assert await serving(coordinator)
    redis.stop()

    async def unhealthy():
        return not await serving(coordinator)

    await until(unhealthy)
    redis.start()
    await until(lambda: serving(coordinator))


async def test_a_coordinator_starts_without_its_redis_and_works_once_it_comes(start, redis):
    redis.stop()
    coordinator = await start()
    assert not await serving(coordinator)
    redis.start()
    await until(lambda: answers(coordinator.join("v1")))
    await coordinator.open()


def test_credentials_are_never_shown():
    assert without_credentials("redis://user:secret@host:6379/3?password=secret") == "redis://host:6379/3"
    assert "secret" not in RedisStore("rediss://:secret@host:6379/0").name
