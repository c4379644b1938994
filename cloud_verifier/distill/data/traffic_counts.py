"""Count the traffic of each class since the last training run, and decide by the counts whether to train."""

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
    from cloud_verifier.traffic.log import TrafficLog
    from cloud_verifier.traffic.passage import Passage

MAX_TENANT_CLASSES = 8
"""Classes of one tenant that are counted separately: the first ones seen. The others are counted as one, `OTHERS`."""
LATE_S = 300.0
"""Seconds by which a passage may arrive after newer ones, since a verifier writes them in turns."""
FRESH_SHARE = 0.1
"""Least share of the new tokens with which a class is among those that a run trains for."""
LATEST_WEIGHT = 0.5
"""Weight of the latest run's traffic in the usual acceptance, a moving average over runs."""


class ClassTraffic(BaseModel, frozen=True):
    """Token counts of one class, as a run or the next decision to train takes them into account."""

    tokens: int = 0
    judged: int = 0
    """Tokens over which acceptance is measured: of sessions that drafted with the incumbent release."""
    guessed: int = 0
    """Those of the judged tokens that the device had proposed; `guessed` is the name in state.json."""

    @property
    def acceptance(self) -> float:
        return self.guessed / self.judged if self.judged else 0.0


class _ClassCounter:
    """Counts the tokens of a class, and measures acceptance over the latest `window` judged ones (see ClassTraffic)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._tokens = self._judged = self._proposed = 0
        self._recent: deque[tuple[int, int]] = deque()

    def add(self, tokens: int, proposed: int | None) -> None:
        """Add tokens. proposed: how many the device had proposed; None if it did not draft with the incumbent."""
        self._tokens += tokens
        if proposed is None:
            return
        self._recent.append((tokens, proposed))
        self._judged, self._proposed = self._judged + tokens, self._proposed + proposed
        while self._judged - self._recent[0][0] >= self._window:
            old_tokens, old_proposed = self._recent.popleft()
            self._judged, self._proposed = self._judged - old_tokens, self._proposed - old_proposed

    def counts(self) -> ClassTraffic:
        return ClassTraffic(tokens=self._tokens, judged=self._judged, guessed=self._proposed)


class TrafficCounter:
    """Counts one target's traffic by class, and reads only new passages each time.

    Every token of a session counts once, even if it was recorded more than once.
    """

    def __init__(self, log: TrafficLog, weights_hash: str, window: int, clock: Callable[[], float] = time.time) -> None:
        """Take `window`, the number of tokens over which the acceptance of a class is measured."""
        self._clock = clock
        self._log = log
        self._weights_hash = weights_hash
        self._window = window
        self._incumbent = ""
        self._since = self._newest = 0.0
        self._ends: dict[str, int] = {}
        """Session id -> position up to which its tokens are counted."""
        self._classes: dict[str, _ClassCounter] = {}
        self._tenants: dict[str, set[str]] = {}
        """Tenant -> its classes that are counted separately."""

    def count(self, since_unix: float, incumbent: str) -> tuple[dict[str, ClassTraffic], float]:
        """Return the traffic after `since_unix` by class, and the time of the newest passage (`since_unix` if none).

        incumbent: hex digest of the draft whose acceptance is measured.
        """
        if (since_unix, incumbent) != (self._since, self._incumbent):
            self._incumbent, self._since, self._newest = incumbent, since_unix, since_unix
            self._ends, self._classes, self._tenants = {}, {}, {}
        now = self._clock()
        passages = self._log.read(max(since_unix, self._newest - LATE_S), whole=False)
        for passage in sorted(passages, key=lambda one: one.time_unix):  # files of several verifiers overlap
            # A verifier's clock may be ahead: its passages are counted later, so that `_newest` is not in the future.
            if since_unix < passage.time_unix <= now and passage.weights_hash == self._weights_hash:
                self._add(passage)
                self._newest = max(self._newest, passage.time_unix)
        return {name: counter.counts() for name, counter in self._classes.items()}, self._newest

    def tidy_log(self, now: float) -> None:
        """Delete expired passages from the log."""
        self._log.tidy(now=now)

    def _add(self, passage: Passage) -> None:
        already = max(0, self._ends.get(passage.session_id, 0) - passage.start)
        if already >= len(passage):
            return
        self._ends[passage.session_id] = passage.end
        judged = passage.draft_release.removeprefix("sha256:") == self._incumbent
        proposed = int(np.count_nonzero(passage.proposed_depths[already:])) if judged else None
        name = self._class_name(passage.tenant, passage.traffic_class)
        self._classes.setdefault(name, _ClassCounter(self._window)).add(len(passage) - already, proposed)

    def _class_name(self, tenant: str, name: str) -> str:
        """Return the name to count a class by: `OTHERS` beyond the limit, since clients can invent any number."""
        names = self._tenants.setdefault(tenant, set())
        if name not in names and len(names) >= MAX_TENANT_CLASSES:
            return OTHERS
        names.add(name)
        return name


def training_due(
    traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float], config: DistillConfig
) -> tuple[str, tuple[str, ...]] | None:
    """Return the reason to train now and the classes to train for; None if there is none.

    traffic: by class, since the last run. usual: acceptance by class, from the traffic of earlier runs; a new class is
    compared with the mean of all classes.
    """
    total = sum(counts.tokens for counts in traffic.values())
    fresh = tuple(sorted(name for name, counts in traffic.items() if counts.tokens >= FRESH_SHARE * total))
    for name, reason in alarms(traffic, usual, config).items():
        if traffic[name].tokens >= config.run_tokens or total >= config.fresh_tokens:
            return reason, tuple(sorted({*fresh, name}))
    if total >= config.fresh_tokens:
        return f"{total} fresh tokens", fresh
    return None


def alarms(traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float], config: DistillConfig) -> dict[str, str]:
    """Return class -> description of its fall in acceptance, also for classes with too few tokens to train for."""
    found = {}
    for name, counts in sorted(traffic.items()):
        expected = usual.get(name, sum(usual.values()) / len(usual) if usual else 0.0)
        if counts.judged >= config.alarm_tokens and counts.acceptance < expected - config.alarm_fall:
            found[name] = f"acceptance on class {name!r} is {counts.acceptance:.2f}, usual is {expected:.2f}"
    return found


def updated_usual(
    usual: Mapping[str, float], traffic: Mapping[str, ClassTraffic], config: DistillConfig
) -> dict[str, float]:
    """Return the usual acceptance by class after a run with `traffic`; a class with little traffic keeps its value."""
    latest = {name: counts.acceptance for name, counts in traffic.items() if counts.judged >= config.alarm_tokens}
    mean = {name: new + (1 - LATEST_WEIGHT) * (usual.get(name, new) - new) for name, new in latest.items()}
    return {**usual, **mean}
