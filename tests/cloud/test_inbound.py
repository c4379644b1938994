"""Test which of a device's messages are read, at what rate, which go to the engine, and which end the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_engine import VOCABULARY, front

from cloud_verifier.config import LIMITS
from cloud_verifier.front.session_stream import NODES_PER_MESSAGE, RateLimiter
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


def append(*tokens: int) -> dict[str, session_pb2.Append]:
    return {"append": session_pb2.Append(first_id=1, up=[0] * len(tokens), token=tokens)}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (append(*range(LIMITS.in_flight + 1)), "nodes in append.token is 129, must be at most 128, limits.in_flight"),
        (append(VOCABULARY), f"a token id in append.token is {VOCABULARY}, must be less than {VOCABULARY}"),
        ({"cancel": session_pb2.Cancel(epoch=8)}, "cancel.epoch is 8, must be 1, the stream's"),
        ({"draft": session_pb2.DraftInUse(release="a b")}, "draft.release is"),
        ({"open": session_pb2.Open()}, "kind open"),
        ({}, "kind None"),
    ],
)
async def test_what_breaks_a_bound_reaches_no_engine_and_is_counted_as_nothing(
    message: dict[str, Any], said: str, tmp_path: Path
) -> None:
    async with front(tmp_path) as verifier:
        stream = await verifier.open("s")
        await stream.send(**message)
        refused = await stream.refusal()
        assert isinstance(refused, BadRequest) and said in str(refused)
        kinds = {request.WhichOneof("kind") for request in verifier.engine.requests}
        assert kinds <= {"start", "update", "stop"} and verifier.service.counters.appends == 0
