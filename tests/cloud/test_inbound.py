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


class Inbound:
    """Read messages from a script, and keep their effects."""

    def __init__(self, burst: int = 100) -> None:
        self.sent: list[str] = []
        self.drained = 0
        self.counts = FrontCounters()
        self.heartbeat = Heartbeat(0.5, 20.0)
        self.news = 0
        self.messages = InboundMessages(
            epoch=7,
            in_flight=3,
            vocabulary_size=10,
            limiter=RateLimiter(1e6, burst),
            heartbeat=self.heartbeat,
            counters=StreamCounters(self.counts),
            send=lambda **kind: self.sent.extend(kind),
            drain=self._drain,
        )

    async def read(self, *messages: session_pb2.ClientMessage) -> None:
        async def requests() -> AsyncIterator[session_pb2.ClientMessage]:
            for message in messages:
                yield message

        await self.messages.read(requests(), self._known)

    async def _drain(self) -> None:
        self.drained += 1

    def _known(self) -> None:
        self.news += 1


def append(*tokens: int) -> session_pb2.ClientMessage:
    return session_pb2.ClientMessage(append=session_pb2.Append(first_id=1, up=[0] * len(tokens), token=tokens))


async def test_what_passes_its_checks_goes_to_the_engine_in_order_and_waits_while_that_is_behind():
    inbound = Inbound()
    release = session_pb2.ClientMessage(draft=session_pb2.DraftInUse(release="r"))
    cancel = session_pb2.ClientMessage(cancel=session_pb2.Cancel(epoch=7))
    await inbound.read(append(1, 2), append(), release, cancel, cancel)
    assert inbound.sent == ["append", "append", "draft", "cancel"]
    assert (inbound.counts.appends, inbound.counts.nodes) == (2, 2)
    assert inbound.drained == 5


async def test_an_answer_to_a_ping_is_measured_without_waiting_for_the_engine():
    inbound = Inbound()
    nonces = [inbound.heartbeat.ping().nonce for _ in range(2)]
    await inbound.read(*(session_pb2.ClientMessage(pong=session_pb2.Pong(nonce=n)) for n in (*nonces, 99)))
    assert inbound.sent == ["update", "update"]
    assert (inbound.drained, inbound.news) == (0, 1)
    assert sum(inbound.counts.rtt_s.counts) == 2


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
    inbound = Inbound()
    with pytest.raises(BadRequest) as refused:
        await inbound.read(message)
    assert said in str(refused.value)
    assert (inbound.sent, inbound.counts.appends) == ([], 0)
