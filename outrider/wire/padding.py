"""Pad the messages of a session's stream: TLS hides no sizes, and the size of a Commit tells how many tokens were
accepted, and so something of the text (arXiv 2411.01076)."""

from __future__ import annotations

from typing import TypeVar

from outrider.core.protocol.messages import MAX_LOGPROBS
from outrider.wire.v1 import session_pb2 as pb

M = TypeVar("M", pb.ClientMessage, pb.ServerMessage)

LEAST_BYTES = 128
"""A Commit of 30 tokens and an Append of 28 nodes fit."""
_STEP_BYTES = 4_096
_TOKENS = 32
"""Tokens whose log-probabilities fit the least size of a stream that has them."""


def padded(message: M, least: int = LEAST_BYTES) -> M:
    """Fill a message's padding, so that it has `least` bytes, or twice as many as often as needed up to 4,096, and from
    there on a multiple of that more. Return it."""
    size, whole = message.ByteSize(), least
    # The field takes two bytes besides its zeros, and three from 128 zeros on, so that exactly 130 bytes cannot be
    # filled. From a size to the next one above 256 there is room enough for 131; below, 130 never are left.
    while size > whole - (2 if whole <= 2 * LEAST_BYTES else 131):
        whole += min(whole, _STEP_BYTES)
    left = whole - size
    message.padding = bytes(left - 2 if left < 130 else left - 3)
    return message


def least_bytes(attach: pb.Attach) -> int:
    """Return the least size of messages to a device. It is larger with log-probabilities, whose size tells the number
    of tokens, too."""
    if not attach.HasField("logprobs"):
        return LEAST_BYTES
    return LEAST_BYTES + _TOKENS * (8 + 8 * min(attach.logprobs, MAX_LOGPROBS))
