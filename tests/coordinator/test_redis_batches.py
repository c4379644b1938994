"""Test that calls which tasks make at once reach Redis in one message, and that none suffers from another."""

import asyncio

import pytest
import redis as sync_redis
from redis import exceptions

from coordinator.store import redis_store
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import Unavailable


@pytest.fixture
async def store(redis):
    store = RedisStore(redis.url)
    yield store
    await store.close()


async def echoes(store: RedisStore, texts: list[str]) -> list[list[str]]:
    return await asyncio.gather(*(store.call("echo", [("ECHO", text), ("ECHO", text + "!")]) for text in texts))


async def test_calls_of_one_turn_are_one_message_and_each_gets_its_own_replies(store, redis, monkeypatch):
    await store.now_unix()
    sent = []
    execute = store._redis.pipeline().__class__.execute
    monkeypatch.setattr(
        store._redis.pipeline().__class__,
        "execute",
        lambda pipe, **options: sent.append(len(pipe.command_stack)) or execute(pipe, **options),
    )
    assert await echoes(store, ["a", "b", "c"]) == [["a", "a!"], ["b", "b!"], ["c", "c!"]]
    assert sent == [6]
    await store.call("echo", [("ECHO", "later")])
    assert sent == [6, 1]


async def test_many_calls_are_several_messages(store, monkeypatch):
    monkeypatch.setattr(redis_store, "BATCH", 2)
    texts = [str(number) for number in range(5)]
    assert await echoes(store, texts) == [[text, text + "!"] for text in texts]


async def test_a_command_that_fails_fails_its_own_call_alone(store, redis):
    with sync_redis.Redis.from_url(redis.url) as link:
        link.set("a-text", "x")
    wrong = store.call("wrong", [("ECHO", "before"), ("HGETALL", "a-text"), ("ECHO", "after")])
    found, error = await asyncio.gather(store.call("echo", [("ECHO", "a")]), wrong, return_exceptions=True)
    assert found == ["a"]
    assert isinstance(error, exceptions.ResponseError) and "WRONGTYPE" in str(error)
    assert store.counters.failed == {("wrong", "ResponseError"): 1}


async def test_a_command_that_cannot_be_sent_fails_its_own_call_alone(store):
    calls = (
        store.call("echo", [("ECHO", "a")]),
        store.call("wrong", [("ECHO", object())]),
        store.call("time", [("TIME",)]),
    )
    found, error, [time] = await asyncio.gather(*calls, return_exceptions=True)
    assert found == ["a"]
    assert isinstance(error, exceptions.DataError)
    assert len(time) == 2


async def test_a_call_that_is_given_up_leaves_its_neighbours_alone(store):
    given_up = asyncio.create_task(store.call("echo", [("ECHO", "a")]))
    other = asyncio.create_task(store.call("echo", [("ECHO", "b")]))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await other == ["b"]
    assert given_up.cancelled() or await asyncio.wait([given_up])
    assert await store.call("echo", [("ECHO", "c")]) == ["c"]


async def test_scripts_work_again_once_redis_has_forgotten_them(store, redis):
    for _ in range(2):
        assert await store.run("news", ["a", "b", "c", "d"], [0, 1, 1]) is not None
        with sync_redis.Redis.from_url(redis.url) as link:
            link.script_flush()


async def test_without_redis_every_call_is_refused():
    store = RedisStore("redis://127.0.0.1:1")
    errors = await asyncio.gather(*(store.now_unix() for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in errors] == [Unavailable] * 3
    await store.close()
