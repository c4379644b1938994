"""Observe a device's connection, and learn from the sizes of frames how many tokens it got (arXiv 2411.01076)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from google.protobuf.message import Message

from benchmarks.attack.finding import Finding, rounded
from benchmarks.attack.lab import HONEST, Lab
from benchmarks.attack.wiretap import Seen, Wiretap
from outrider.wire.frames import LEAST_PADDING, Padding, padded_size
from outrider.wire.v1 import session_pb2 as pb

MOST_BITS = 0.1
"""Information about the tokens of a commit that the size of a frame may hold."""
LEAST_BITS = 0.3
"""Entropy of the tokens per commit below which there was nothing to learn."""
SHUFFLES = 50
PADDINGS: tuple[Padding, ...] = ("off", "buckets", "constant")
SESSIONS_S = 160.0
TOKENS = 160
"""Tokens of a session: longer texts of the small target repeat themselves, so that nearly all of a tree is accepted."""


async def frame_sizes(lab: Lab) -> Finding:
    """Record the sizes of the frames of a session that drafts, and what they tell of its tokens."""
    async with Wiretap(lab.verifier.address) as tap:
        request = lab.request(HONEST, temperature=0.8, repetition_penalty=1.0, max_tokens=TOKENS, other_seeds=1)
        sessions = lab.size.pick(smoke=1, quick=8, full=40)
        request["client"] |= {"reroute": {lab.verifier.address: tap.address}}
        async with lab.under_attack():
            ended = await lab.product.run_device(
                "generate",
                lab.cores[1],
                SESSIONS_S,
                **request,
                draft="auto",
                sessions=sessions,
            )
        down, up = _commits(tap.down), _appends(tap.up)
        seen = [*tap.down, *tap.up]
    tokens = [count for _, _, count in down]
    follows = _next_sizes([at for at, _, _ in down], up)
    known = [(count, size) for count, size in zip(tokens, follows, strict=True) if size is not None]
    commit_bits = information(tokens, [size for _, size, _ in down])
    append_bits = information([count for count, _ in known], [size for _, size in known])
    measured = {
        "commits": len(tokens),
        "entropy_bits": rounded(entropy(tokens)),
        "commit_bits": rounded(commit_bits),
        "append_bits": rounded(append_bits),
        "commit_sizes": len({size for _, size, _ in down}),
        "device_ended": ended.code,
        "bytes_per_token": {padding: rounded(_bytes(seen, padding) / max(1, sum(tokens))) for padding in PADDINGS},
    }
    held = entropy(tokens) >= LEAST_BITS and commit_bits <= MOST_BITS and append_bits <= MOST_BITS
    return Finding(held, measured, f"either size holds at most {MOST_BITS} bit of the tokens of a commit")


def _bytes(seen: Sequence[Seen], padding: Padding) -> int:
    """Return the bytes of these messages, as they would be with this padding."""
    bare = [_bare_size(one.message) for one in seen]
    if padding == "off":
        return sum(bare)
    return sum(padded_size(size + LEAST_PADDING, padding) for size in bare)


def _bare_size(message: Message) -> int:
    plain = type(message)()
    plain.CopyFrom(message)
    plain.ClearField("padding")
    return plain.ByteSize()


def entropy(values: Sequence[object]) -> float:
    """Return the entropy of the values in bits."""
    return -sum(n / len(values) * math.log2(n / len(values)) for n in Counter(values).values()) if values else 0.0


def information(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the mutual information of two series in bits, less what series of these values have by chance."""
    draw, other = random.Random(0), list(second)
    by_chance = 0.0
    for _ in range(SHUFFLES):
        draw.shuffle(other)
        by_chance += _plain_information(first, other) / SHUFFLES
    return max(0.0, _plain_information(first, second) - by_chance)


def _plain_information(first: Sequence[int], second: Sequence[int]) -> float:
    return entropy(first) + entropy(second) - entropy(list(zip(first, second, strict=True)))


def _commits(down: Sequence[Seen]) -> list[tuple[float, int, int]]:
    """Return when each Commit with tokens passed, its frame's size, and its number of tokens."""
    messages = ((seen, seen.message) for seen in down)
    return [
        (seen.at, seen.size, len(message.commit.token))
        for seen, message in messages
        if isinstance(message, pb.ServerMessage) and message.WhichOneof("kind") == "commit" and message.commit.token
    ]


def _appends(up: Sequence[Seen]) -> list[tuple[float, int]]:
    """Return when each Append passed, and its frame's size."""
    messages = ((seen, seen.message) for seen in up)
    return [
        (seen.at, seen.size)
        for seen, message in messages
        if isinstance(message, pb.ClientMessage) and message.WhichOneof("kind") == "append"
    ]


def _next_sizes(times: Sequence[float], appends: Sequence[tuple[float, int]]) -> list[int | None]:
    """Return for each time the size of the first Append after it; None if the next time comes before one."""
    found: list[int | None] = []
    at = 0
    for begin, end in zip(times, [*times[1:], math.inf], strict=True):
        while at < len(appends) and appends[at][0] < begin:
            at += 1
        found.append(appends[at][1] if at < len(appends) and appends[at][0] < end else None)
    return found
