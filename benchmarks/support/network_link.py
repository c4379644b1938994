"""Model a wide-area link without I/O: delay, jitter, bandwidth and changes over time; times are in seconds."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from outrider.core.errors import BadRequest

MAX_RTT_MS = 60_000.0
MIN_BPS = 1_000.0
MAX_QUEUE_BYTES = 1 << 24
MAX_STALL_S = 3_600.0
MAX_SCRIPT_S = 86_400.0
MAX_SCRIPT_STEPS = 10_000
MAX_CHUNK_BYTES = 1 << 14
_PACKET_BYTES = 1_200
_CHUNK_S = 0.01


@dataclass(frozen=True, slots=True)
class Link:
    """Describe the state of a link, shared by its connections. Raises BadRequest for a value outside its bound."""

    rtt_ms: float = 0.0
    """Round trip; each way takes half of it."""
    jitter_ms: float = 0.0
    """Each chunk waits from 0 to this longer, evenly drawn; those behind it wait, too, so that none overtakes it."""
    up_bps: float = math.inf
    """Bits per second from clients to the target; only payload counts, not headers and handshakes."""
    down_bps: float = math.inf
    queue_bytes: int = 1 << 16
    """Bytes that may wait for a free line in each direction, as in a router's buffer; then the sender must wait."""

    def __post_init__(self) -> None:
        for field in ("rtt_ms", "jitter_ms"):
            if not 0.0 <= (value := getattr(self, field)) <= MAX_RTT_MS:
                raise BadRequest.bound(field, value, f"from 0 to {MAX_RTT_MS:.0f}")
        for field in ("up_bps", "down_bps"):
            if not (value := getattr(self, field)) >= MIN_BPS:
                raise BadRequest.bound(field, value, f"at least {MIN_BPS:.0f} (a dead link is a blackhole)")
        if not MAX_CHUNK_BYTES <= self.queue_bytes <= MAX_QUEUE_BYTES:
            raise BadRequest.bound("queue_bytes", self.queue_bytes, f"from {MAX_CHUNK_BYTES} to {MAX_QUEUE_BYTES}")

    def bps(self, *, up: bool) -> float:
        """Return the bits per second of one direction."""
        return self.up_bps if up else self.down_bps

    def chunk_bytes(self, *, up: bool) -> int:
        """Return the bytes of a chunk: 10 ms of the line, and at least a packet, so that a slow line flows evenly."""
        return int(min(MAX_CHUNK_BYTES, max(_PACKET_BYTES, self.bps(up=up) / 8.0 * _CHUNK_S)))


@dataclass(frozen=True, slots=True)
class Stall:
    """Pause a link: nothing passes and nothing is lost, as in a radio handover."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0.0 < self.seconds <= MAX_STALL_S:
            raise BadRequest.bound("seconds", self.seconds, f"more than 0, at most {MAX_STALL_S:.0f}")


class LinkEvent(enum.Enum):
    """Name a change that happens to all connections at once."""

    DROP = "drop"
    """Close all connections orderly."""
    RESET = "reset"
    """Reset all connections: both sides get an RST."""
    BLACKHOLE = "blackhole"
    """Let nothing pass, end or answer, until LIFT."""
    LIFT = "lift"
    """End a blackhole or a stall."""


Change: TypeAlias = Link | Stall | LinkEvent
Script: TypeAlias = tuple[tuple[float, Change], ...]
"""(seconds since the script began, the change at that time), in order of time."""


def check_script(script: Script) -> None:
    """Raise BadRequest for times that go back or are out of bounds, and for entries that are no change."""
    if len(script) > MAX_SCRIPT_STEPS:
        raise BadRequest.bound("steps in script", len(script), f"at most {MAX_SCRIPT_STEPS}")
    earlier = 0.0
    for index, (at_s, change) in enumerate(script):
        if not earlier <= at_s <= MAX_SCRIPT_S:
            raise BadRequest.bound(f"at_s of script[{index}]", at_s, f"from {earlier:g} to {MAX_SCRIPT_S:.0f}")
        if not isinstance(change, Link | Stall | LinkEvent):
            raise BadRequest.bound(f"change of script[{index}]", repr(change), "a Link, a Stall or a LinkEvent")
        earlier = at_s


class LinkDirection:
    """Model one direction of a link, for all connections: it computes when a chunk that has arrived leaves.

    A chunk waits for its jitter, then for the line, takes `8 * size / bps` on it, and leaves `rtt / 2` after that. So
    over every window of time a direction takes no more than its bandwidth and one chunk.
    """

    def __init__(self, *, up: bool, seed: int = 0) -> None:
        self._up = up
        self._random = random.Random(f"{seed} {'up' if up else 'down'}")
        self._free_s = -math.inf

    def leaves(self, link: Link, arrived_s: float, size: int, *, after_s: float = -math.inf) -> float:
        """Return when a chunk leaves. arrived_s: never falls. after_s: when its connection's last chunk leaves."""
        jitter_s = self._random.uniform(0.0, link.jitter_ms / 1000.0)
        self._free_s = max(self._free_s, arrived_s + jitter_s) + 8.0 * size / link.bps(up=self._up)
        return max(after_s, self._free_s + link.rtt_ms / 2000.0)

    def room_at(self, link: Link) -> float:
        """Return when the queue takes another chunk. Jitter is delay and no load, so it does not fill the queue."""
        return self._free_s - 8.0 * link.queue_bytes / link.bps(up=self._up) - link.jitter_ms / 1000.0


class LinkClock:
    """Keep the link's own time, which stands still while the link is held, so that chunks keep their distances."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held_since: float | None = None
        self._lost_s = 0.0

    @property
    def held(self) -> bool:
        return self._held_since is not None

    def now(self) -> float:
        return (self._clock() if self._held_since is None else self._held_since) - self._lost_s

    def hold(self) -> None:
        if self._held_since is None:
            self._held_since = self._clock()

    def go(self) -> None:
        if self._held_since is not None:
            self._lost_s += self._clock() - self._held_since
            self._held_since = None
