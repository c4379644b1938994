"""Test which of a device's messages are read, at what rate, which go to the engine, and which end the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cloud_verifier.front.counters import FrontCounters, StreamCounters
from cloud_verifier.front.heartbeat import Heartbeat
from cloud_verifier.front.inbound import NODES_PER_MESSAGE, InboundMessages, RateLimiter
from outrider.core.errors import BadRequest
from outrider.wire.v1 import session_pb2

# --- the rate limit, with a clock of our own


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_goes_through_and_what_follows_goes_at_the_rate():
    clock = Clock()
    limiter = RateLimiter(10.0, 3, clock)
    assert [limiter.delay_s() for _ in range(3)] == [0.0] * 3
    for nodes, expected_s in ((0, 0.1), (0, 0.1), (NODES_PER_MESSAGE // 2, 0.15)):
        delay_s = limiter.delay_s(nodes)
        assert abs(delay_s - expected_s) < 1e-9
        clock.now += delay_s
    clock.now += 3600.0  # silence saves up no more than a burst
    assert [limiter.delay_s() > 0.0 for _ in range(4)] == [False, False, False, True]


# --- what a device sends


def append(*tokens: int) -> session_pb2.ClientMessage:
    return session_pb2.ClientMessage(append=session_pb2.Append(first_id=1, up=[0] * len(tokens), token=tokens))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (append(1, 2, 3, 4), "nodes in append.token is 4, must be at most 3, limits.in_flight"),
        (append(10), "a token id in append.token is 10, must be less than 10"),
        (session_pb2.ClientMessage(cancel=session_pb2.Cancel(epoch=8)), "cancel.epoch is 8, must be 7, the stream's"),
        (session_pb2.ClientMessage(draft=session_pb2.DraftInUse(release="a b")), "draft.release is"),
        (session_pb2.ClientMessage(open=session_pb2.Open()), "kind open"),
        (session_pb2.ClientMessage(), "kind None"),
    ],
)
async def test_what_breaks_a_bound_reaches_no_engine_and_is_counted_as_nothing(message, said):
    async def requests() -> AsyncIterator[session_pb2.ClientMessage]:
        yield message

    async def nothing() -> None:
        pass

    sent: list[str] = []
    counts = FrontCounters()
    messages = InboundMessages(
        epoch=7,
        in_flight=3,
        vocabulary_size=10,
        limiter=RateLimiter(1e6, 100),
        heartbeat=Heartbeat(0.5, 20.0),
        counters=StreamCounters(counts),
        send=lambda **kind: sent.extend(kind),
        drain=nothing,
    )
    with pytest.raises(BadRequest) as refused:
        await messages.read(requests(), lambda: None)
    assert said in str(refused.value)
    assert (sent, counts.appends) == ([], 0)
