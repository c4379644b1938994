"""Test that the coordinator reports a dead Redis, and goes on once it is back."""

import asyncio
import contextlib
import os
import signal
import time

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from peers import until

from coordinator.app import main
from coordinator.store.redis_store import RedisStore, without_credentials
from outrider.core.errors import BadRequest, InternalError, OutriderError, Unavailable


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


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (
            "-ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: -OOM command not",
            Unavailable,
            "memory",
        ),
        ("-OOM command not allowed when used memory > 'maxmemory'.", Unavailable, "out of memory: raise its maxmemory"),
        ("-MISCONF Redis is configured to save RDB snapshots", Unavailable, "cannot save to its disk"),
        ("-READONLY You can't write against a read only replica.", Unavailable, "primary's address"),
        ("-NOPERM User u has no permissions to run the 'time' command", Unavailable, "lacks rights"),
        ("-MOVED 3999 127.0.0.1:6381", Unavailable, "Redis cluster"),
        ("-CLUSTERDOWN The cluster is down", Unavailable, "Redis cluster"),
        ("-MASTERDOWN Link with MASTER is down", Unavailable, "without its primary"),
        ("-NOAUTH Authentication required.", Unavailable, "Authentication failed"),
        ("-ERR unknown command 'TIME'", Unavailable, "lacks commands of Redis"),
        ("-WRONGTYPE Operation against a key", InternalError, "refuses 'time'"),
    ],
)
async def test_what_redis_answers_is_told_in_plain_words_without_hello(reply, error, said):
    asked = []

    async def serve(reader, writer):
        with contextlib.closing(writer):
            while begin := await reader.readline():
                words = []
                for _ in range(int(begin[1:])):
                    await reader.readline()
                    words.append((await reader.readline()).strip().decode())
                asked.append(words[0])
                writer.write(b"+OK\r\n" if words[0] == "CLIENT" else f"{reply}\r\n".encode())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        store = RedisStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(error) as caught:
            await store.call("time", [("TIME",)])
        await store.close()
    assert said in str(caught.value) and "HELLO" not in asked


async def test_a_redis_that_throws_keys_away_or_has_a_wrong_clock_is_told_of(redis, caplog, monkeypatch):
    store = RedisStore(redis.url)
    await store.warn()
    assert not caplog.messages
    await store._redis.config_set("maxmemory", "100mb")
    await store._redis.config_set("maxmemory-policy", "allkeys-lru")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 4_300.0)
    await store.warn()
    await store._redis.config_set("maxmemory", "0")
    await store.close()
    clock, eviction = caplog.messages
    assert "is -43" in clock and "maxmemory-policy allkeys-lru" in eviction


ODD = ("pa/ss", "pa#ss", "pa?ss", "12/ss", "p@ss/", "pa[ss", "%/ss", "p ss/", ":pa:/ss")


@pytest.mark.parametrize("password", ODD)
def test_a_url_whose_password_is_not_encoded_is_refused_without_showing_it(password, capsys, monkeypatch, tmp_path):
    url = f"redis://user:{password}@host:6379/0"
    with pytest.raises(BadRequest, match=r"redis is redis://\*\*\*, .* as %XX") as refused:
        RedisStore(url)
    assert password not in str(refused.value)
    (tmp_path / "file.toml").write_text(f"[coordinator]\nredis = '{url}'")
    monkeypatch.setenv("OUTRIDER_COORDINATOR_REDIS", url)
    assert main(["--config", str(tmp_path / "file.toml"), "--listen", "127.0.0.1:0"]) == 2
    assert main(["--listen", "127.0.0.1:0"]) == 2
    for arguments in (["--redis", url], ["--redis", url, "--check-config"], ["--reddis", url], [url], ["--http", url]):
        with contextlib.suppress(SystemExit):
            assert main([*arguments, "--listen", "127.0.0.1:0"]) == 2
    said = "".join(capsys.readouterr())
    assert password not in said and said.count("redis://***") > 3


def test_credentials_are_never_shown():
    assert without_credentials("redis://user:secret@host:6379/3?password=secret") == "redis://host:6379/3"
    assert "secret" not in RedisStore("rediss://:secret@host:6379/0").name
    assert without_credentials("redis://:secret") == "redis://***" and without_credentials("secret") == "no such URL"
    assert str(OutriderError("http://u:p@ss w/rd@h:1/x?token=t0k and more")) == "http://***@h:1/x?token=*** and more"
    assert str(OutriderError("see http://h:80/v1 and org/name@main")) == "see http://h:80/v1 and org/name@main"
