"""Count the traffic of each class since the last run, and decide by the counts whether to train."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.selection import OTHERS

if TYPE_CHECKING:
    from cloud_verifier.traffic.passage import Passage
    from cloud_verifier.traffic.segments import SegmentLog

TENANT_CLASSES = 8
"""Classes of one tenant that are counted apart, the first that come."""
LATE_S = 300.0
"""Seconds by which a passage may come in after newer ones: verifiers write a segment when it is full or old enough."""
FRESH_SHARE = 0.1
"""Share of the new tokens that a class needs for a run to be trained for it."""
ADAPTS = 0.5
"""Weight of a run's traffic in the usual acceptance, which forgets older traffic within two or three runs."""


class ClassTraffic(BaseModel, frozen=True):
    """Counts of the traffic of one class since some time."""

    tokens: int = 0
    judged: int = 0
    """Tokens of sessions that drafted with the release whose acceptance is judged."""
    guessed: int = 0
    """Tokens among them that the device had proposed."""

    @property
    def acceptance(self) -> float:
        return self.guessed / self.judged if self.judged else 0.0


class _ClassCounter:
    """Counts one class: all of its tokens, and the acceptance over the latest `window` tokens that can be judged."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._tokens = self._judged = self._guessed = 0
        self._recent: deque[tuple[int, int]] = deque()

    def add(self, tokens: int, guessed: int | None) -> None:
        """guessed: tokens that the device had proposed; None if its draft is not the one that is judged."""
        self._tokens += tokens
        if guessed is None:
            return
        self._recent.append((tokens, guessed))
        self._judged, self._guessed = self._judged + tokens, self._guessed + guessed
        while self._judged - self._recent[0][0] >= self._window:
            old, hits = self._recent.popleft()
            self._judged, self._guessed = self._judged - old, self._guessed - hits

    def counts(self) -> ClassTraffic:
        return ClassTraffic(tokens=self._tokens, judged=self._judged, guessed=self._guessed)


class TrafficCounter:
    """Counts the traffic of one target, reading only what is new each time.

    Every token of a session counts once, however often it is recorded.
    """

    def __init__(self, log: SegmentLog, weights_hash: str, window: int, clock: Callable[[], float] = time.time) -> None:
        """window: tokens over which a class's acceptance is judged."""
        self._clock = clock
        self._log = log
        self._weights_hash = weights_hash
        self._window = window
        self._release = ""
        self._since = self._newest = 0.0
        self._ends: dict[str, int] = {}
        """Position in each session up to which it is counted."""
        self._classes: dict[str, _ClassCounter] = {}
        self._tenants: dict[str, set[str]] = {}
        """Classes of each tenant that are counted apart."""

    def count(self, since_unix: float, release: str) -> tuple[dict[str, ClassTraffic], float]:
        """Return the traffic after `since_unix` by class, and the time of the newest passage (else `since_unix`).

        release: hex digest of the draft whose acceptance is judged.
        """
        if (since_unix, release) != (self._since, self._release):
            self._release, self._since, self._newest = release, since_unix, since_unix
            self._ends, self._classes, self._tenants = {}, {}, {}
        now = self._clock()
        for passage in self._log.read(max(since_unix, self._newest - LATE_S), whole=False):
            # A verifier's clock may be ahead: its passages count when their time has come, and hide no others before.
            if since_unix < passage.time_unix <= now and passage.weights_hash == self._weights_hash:
                self._add(passage)
                self._newest = max(self._newest, passage.time_unix)
        return {name: one.counts() for name, one in self._classes.items()}, self._newest

    def tidy_log(self, now: float) -> None:
        """Delete expired passages from the log, and merge its small segments."""
        self._log.expire(now)
        self._log.compact(now)

    def _add(self, passage: Passage) -> None:
        counted = max(0, self._ends.get(passage.session_id, 0) - passage.start)
        if counted >= len(passage):
            return
        self._ends[passage.session_id] = passage.end
        judged = passage.draft_release.removeprefix("sha256:") == self._release
        guessed = int(np.count_nonzero(passage.guessed[counted:])) if judged else None
        name = self._class_name(passage.tenant, passage.traffic_class)
        self._classes.setdefault(name, _ClassCounter(self._window)).add(len(passage) - counted, guessed)

    def _class_name(self, tenant: str, name: str) -> str:
        """Return `OTHERS` for a tenant's classes beyond the first few: clients can name as many as they like."""
        names = self._tenants.setdefault(tenant, set())
        if name not in names and len(names) >= TENANT_CLASSES:
            return OTHERS
        names.add(name)
        return name


def due(
    traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float], config: DistillConfig
) -> tuple[str, tuple[str, ...]] | None:
    """Return the reason to train now and the classes to train for; None if there is none.

    traffic: by class, since the last run. usual: acceptance by class, as earlier runs found it; a class that is new is
    compared with the mean of the others.
    """
    total = sum(one.tokens for one in traffic.values())
    fresh = tuple(sorted(name for name, one in traffic.items() if one.tokens >= FRESH_SHARE * total))
    for name, reason in alarms(traffic, usual, config).items():
        if traffic[name].tokens >= config.run_tokens or total >= config.fresh_tokens:
            return reason, tuple(sorted({*fresh, name}))
    if total >= config.fresh_tokens:
        return f"{total} fresh tokens", fresh
    return None


def alarms(traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float], config: DistillConfig) -> dict[str, str]:
    """Return the classes whose acceptance has fallen, with the figures, however little there is to learn from."""
    found = {}
    for name, one in sorted(traffic.items()):
        expected = usual.get(name, sum(usual.values()) / len(usual) if usual else 0.0)
        if one.judged >= config.alarm_tokens and one.acceptance < expected - config.alarm_fall:
            found[name] = f"acceptance on class {name!r} is {one.acceptance:.2f}, usual is {expected:.2f}"
    return found


def adapted(usual: Mapping[str, float], traffic: Mapping[str, ClassTraffic], config: DistillConfig) -> dict[str, float]:
    """Return the usual acceptance after a run, by class; a class with little traffic keeps its own."""
    new = dict(usual)
    for name, one in traffic.items():
        if one.judged >= config.alarm_tokens:
            new[name] = one.acceptance + (1 - ADAPTS) * (usual.get(name, one.acceptance) - one.acceptance)
    return new
