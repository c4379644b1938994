"""Count the traffic of each class since the last training run, and decide by the counts whether to train."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from cloud_verifier.distill.data.selection import OTHERS

if TYPE_CHECKING:
    from cloud_verifier.traffic.log import TrafficLog
    from cloud_verifier.traffic.passage import Passage

ALARM_TOKENS = 20_000
"""Latest recorded tokens of a class over which its acceptance is measured."""
ALARM_FALL = 0.1
"""Fall of a class's acceptance below its usual value that is a reason to train."""
RUN_TOKENS = 60_000
"""Recorded tokens of the fallen class without which no run begins: from less a draft learns less."""
MAX_TENANT_CLASSES = 8
"""Classes of one tenant that are counted separately: the first ones seen. The others are counted as one, `OTHERS`."""
LATE_S = 300.0
"""Seconds by which a passage may arrive after newer ones, since a verifier writes them in turns."""
FRESH_SHARE = 0.1
"""Least share of the new tokens with which a class is among those that a run trains for."""


class ClassTraffic:
    """Counts the tokens of a class, and measures acceptance over the latest `window` judged ones.

    Judged are tokens of sessions that drafted with the incumbent release. Acceptance is the share of them that the
    device had proposed.
    """

    def __init__(self, window: int) -> None:
        self.tokens = 0
        self.best: float | None = None
        """The highest acceptance over a whole window; None before there was one."""
        self.judged = 0
        self._window = window
        self._proposed = 0
        self._recent: deque[tuple[int, int]] = deque()

    @property
    def acceptance(self) -> float | None:
        """Return the present acceptance; None where too few tokens are judged."""
        return self._proposed / self.judged if self.judged >= self._window else None

    def add(self, tokens: int, proposed: int | None) -> None:
        """Add tokens. proposed: how many the device had proposed; None if it did not draft with the incumbent."""
        self.tokens += tokens
        if proposed is None:
            return
        self._recent.append((tokens, proposed))
        self.judged, self._proposed = self.judged + tokens, self._proposed + proposed
        while self.judged - self._recent[0][0] >= self._window:
            old_tokens, old_proposed = self._recent.popleft()
            self.judged, self._proposed = self.judged - old_tokens, self._proposed - old_proposed
        if self.acceptance is not None:
            self.best = max(self.best or 0.0, self.acceptance)


class TrafficCounter:
    """Counts one target's traffic by class, and reads only new passages each time.

    Every token of a session counts once, even if it was recorded more than once.
    """

    def __init__(
        self, log: TrafficLog, weights_hash: str, clock: Callable[[], float] = time.time, window: int = ALARM_TOKENS
    ) -> None:
        self._clock = clock
        self.log = log
        self._weights_hash = weights_hash
        self._window = window
        self._incumbent = ""
        self._since = self._newest = 0.0
        self._ends: dict[str, int] = {}
        """Session id -> position up to which its tokens are counted."""
        self._classes: dict[str, ClassTraffic] = {}
        self._tenants: dict[str, set[str]] = {}
        """Tenant -> its classes that are counted separately."""

    def count(self, since_unix: float, incumbent: str) -> tuple[Mapping[str, ClassTraffic], float]:
        """Return the traffic after `since_unix` by class, and the time of the newest passage (`since_unix` if none).

        incumbent: hex digest of the draft whose acceptance is measured.
        """
        if (since_unix, incumbent) != (self._since, self._incumbent):
            self._incumbent, self._since, self._newest = incumbent, since_unix, since_unix
            self._ends, self._classes, self._tenants = {}, {}, {}
        now = self._clock()
        passages = self.log.read(max(since_unix, self._newest - LATE_S), whole=False)
        for passage in sorted(passages, key=lambda one: one.time_unix):  # files of several verifiers overlap
            # A verifier's clock may be ahead: its passages are counted later, so that `_newest` is not in the future.
            if since_unix < passage.time_unix <= now and passage.weights_hash == self._weights_hash:
                self._add(passage)
                self._newest = max(self._newest, passage.time_unix)
        return self._classes, self._newest

    def _add(self, passage: Passage) -> None:
        already = max(0, self._ends.get(passage.session_id, 0) - passage.start)
        if already >= len(passage):
            return
        self._ends[passage.session_id] = passage.end
        judged = passage.draft_release.removeprefix("sha256:") == self._incumbent
        proposed = int(np.count_nonzero(passage.proposed_depths[already:])) if judged else None
        name = self._class_name(passage.tenant, passage.traffic_class)
        self._classes.setdefault(name, ClassTraffic(self._window)).add(len(passage) - already, proposed)

    def _class_name(self, tenant: str, name: str) -> str:
        """Return the name to count a class by: `OTHERS` beyond the limit, since clients can invent any number."""
        names = self._tenants.setdefault(tenant, set())
        if name not in names and len(names) >= MAX_TENANT_CLASSES:
            return OTHERS
        names.add(name)
        return name


def total_tokens(traffic: Mapping[str, ClassTraffic]) -> int:
    """Return the tokens of all classes."""
    return sum(counts.tokens for counts in traffic.values())


def training_due(
    traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float], fresh_tokens: int
) -> tuple[str, tuple[str, ...]] | None:
    """Return the reason to train now and the classes to train for; None if there is none.

    traffic: by class, since the last run. usual: acceptance by class, as it was at the last run. fresh_tokens: of all
    classes, which are reason enough.
    """
    total = total_tokens(traffic)
    fresh = tuple(sorted(name for name, counts in traffic.items() if counts.tokens >= FRESH_SHARE * total))
    for name, reason in alarms(traffic, usual).items():
        if traffic[name].tokens >= RUN_TOKENS or total >= fresh_tokens:
            return reason, tuple(sorted({*fresh, name}))
    return (f"{total} fresh tokens", fresh) if total >= fresh_tokens else None


def alarms(traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float]) -> dict[str, str]:
    """Return class -> description of its fall in acceptance, also for classes with too few tokens to train for."""
    found = {}
    for name, counts in sorted(traffic.items()):
        expected = _expected(name, counts, usual)
        if counts.acceptance is not None and counts.acceptance < expected - ALARM_FALL:
            found[name] = f"acceptance on class {name!r} is {counts.acceptance:.2f}, usual is {expected:.2f}"
    return found


def updated_usual(traffic: Mapping[str, ClassTraffic], usual: Mapping[str, float]) -> dict[str, float]:
    """Return the usual acceptance by class after a run with this traffic: half way from what was usual to what it is.

    So an acceptance that training does not raise becomes the usual one. A class with little traffic keeps its value.
    """
    blended = dict(usual)
    for name, one in traffic.items():
        if one.acceptance is not None:
            blended[name] = (max(usual.get(name, one.acceptance), one.best or 0.0) + one.acceptance) / 2
    return blended


def _expected(name: str, counts: ClassTraffic, usual: Mapping[str, float]) -> float:
    """Return a class's usual acceptance: its highest since the last run, but at least what was usual then.

    A new class is compared with the mean of all others.
    """
    before = usual.get(name, sum(usual.values()) / len(usual) if usual else 0.0)
    return max(before, counts.best or 0.0)
