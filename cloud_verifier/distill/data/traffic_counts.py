"""Counts what the traffic log holds of each class since the last run, without reading it all again at every look."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cloud_verifier.distill.data.retrain_trigger import Seen
from cloud_verifier.distill.data.selection import OTHERS

if TYPE_CHECKING:
    from cloud_verifier.traffic.passage import Passage

TENANT_CLASSES = 8
"""Of one tenant that are told apart, the first that come."""
LATE_S = 300.0
"""Verifiers write a segment when it is full or old enough: passages may come in so long after newer ones."""


class Log(Protocol):
    """The part of `cloud_verifier.traffic.segments.SegmentLog` that is used here."""

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]: ...
    def compact(self, now: float) -> object: ...
    def expire(self, now: float) -> object: ...


@dataclass(frozen=True)
class Look:
    """What there is since the last run."""

    seen: Mapping[str, Seen]
    """By traffic class."""
    newest_unix: float
    """Of the newest passage; where there is none, what was asked for."""


class _Class:
    """Sums of one class; of acceptance only the latest `window` tokens."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._tokens = self._judged = self._guessed = 0
        self._recent: deque[tuple[int, int]] = deque()

    def add(self, tokens: int, guessed: int | None) -> None:
        """guessed: None for tokens of sessions with another draft."""
        self._tokens += tokens
        if guessed is None:
            return
        self._recent.append((tokens, guessed))
        self._judged, self._guessed = self._judged + tokens, self._guessed + guessed
        while self._judged - self._recent[0][0] >= self._window:
            old, hits = self._recent.popleft()
            self._judged, self._guessed = self._judged - old, self._guessed - hits

    @property
    def seen(self) -> Seen:
        return Seen(tokens=self._tokens, judged=self._judged, guessed=self._guessed)


class TrafficWatch:
    """Looks at one target's traffic. Every token of a session counts once, however often it is recorded."""

    def __init__(self, log: Log, weights_hash: str, window: int, clock: Callable[[], float] = time.time) -> None:
        """window: tokens over which a class's acceptance is judged."""
        self._clock = clock
        self._log = log
        self._weights_hash = weights_hash
        self._window = window
        self._release = ""
        self._since = self._newest = 0.0
        self._ends: dict[str, int] = {}
        """Of each session, the position up to which it is counted."""
        self._classes: dict[str, _Class] = {}
        self._tenants: dict[str, set[str]] = {}
        """The classes of each tenant that are told apart."""

    def look(self, since_unix: float, release: str) -> Look:
        """What came in after `since_unix`. release: hex digest of the draft whose acceptance is judged."""
        if (since_unix, release) != (self._since, self._release):
            self._begin(release, since_unix)
        now = self._clock()
        for passage in self._log.read(max(since_unix, self._newest - LATE_S), whole=False):
            # A verifier's clock may be ahead: its passages count when their time has come, and hide no others before.
            if since_unix < passage.time_unix <= now and passage.weights_hash == self._weights_hash:
                self._count(passage)
                self._newest = max(self._newest, passage.time_unix)
        return Look({name: one.seen for name, one in self._classes.items()}, self._newest)

    def tidy(self, now: float) -> None:
        """Delete what has expired, and put small segments together."""
        self._log.expire(now)
        self._log.compact(now)

    def _begin(self, release: str, since_unix: float) -> None:
        self._release, self._since, self._newest = release, since_unix, since_unix
        self._ends, self._classes, self._tenants = {}, {}, {}

    def _count(self, passage: Passage) -> None:
        counted = max(0, self._ends.get(passage.session_id, 0) - passage.start)
        if counted >= len(passage):
            return
        self._ends[passage.session_id] = passage.end
        ours = passage.draft_release.removeprefix("sha256:") == self._release
        guessed = int(np.count_nonzero(passage.guessed[counted:])) if ours else None
        name = self._called(passage.tenant, passage.traffic_class)
        self._classes.setdefault(name, _Class(self._window)).add(len(passage) - counted, guessed)

    def _called(self, tenant: str, name: str) -> str:
        """A class is whatever a client says: beyond so many of one tenant they are one, and alarm as one."""
        names = self._tenants.setdefault(tenant, set())
        if name not in names and len(names) >= TENANT_CLASSES:
            return OTHERS
        names.add(name)
        return name
