"""Test that the size of a session's message tells little of what it says."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.wire.padding import LEAST_BYTES, least_bytes, padded
from outrider.wire.v1 import session_pb2 as pb


def commit(tokens: int, alternatives: int | None = None) -> pb.ServerMessage:
    """Return a Commit of the longest tokens, with so many alternatives for each if there are log-probabilities."""
    values = (
        {}
        if alternatives is None
        else {
            "logprob": [-1.0] * tokens,
            "top_id": [150_000] * tokens * alternatives,
            "top_logprob": [-1.0] * tokens * alternatives,
        }
    )
    told = pb.Commit(epoch=1_000, start=8_000, token=[150_000] * tokens, seen=60_000, evaluated=64, **values)
    return pb.ServerMessage(commit=told)


@example(size=122, least=LEAST_BYTES)  # two bytes are left: a field without content
@given(st.integers(0, 20_000), st.sampled_from([LEAST_BYTES, 384, 5_000]))
def test_every_size_is_filled_to_the_byte_and_tells_no_more_than_a_power_of_two(size: int, least: int) -> None:
    message = padded(pb.ServerMessage(opened=pb.Opened(verifier_id="x" * size)), least)
    whole, steps = message.ByteSize(), {least}
    while max(steps) < whole:
        steps.add(max(steps) + min(max(steps), 4_096))
    assert whole in steps
    assert whole <= max(least, 2 * (size + 160))
    assert not any(message.padding)


@pytest.mark.parametrize("alternatives", [0, 1, 5, 20])
def test_with_log_probabilities_the_number_of_tokens_does_not_show_either(alternatives: int) -> None:
    least = least_bytes(pb.Attach(logprobs=alternatives))
    assert len({padded(commit(tokens, alternatives), least).ByteSize() for tokens in range(1, 17)}) == 1


def test_an_attach_that_asks_for_more_than_there_is_makes_no_endless_messages() -> None:
    assert least_bytes(pb.Attach(logprobs=2**32 - 1)) < 8_192
