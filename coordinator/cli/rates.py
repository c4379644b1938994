"""What happened between two looks at a cluster, from counters that only grow while a session lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

HISTORY = 24
"""Frames whose tokens per second are remembered."""
_Counts = Mapping[str, tuple[int, ...]]


class Rates:
    """Between the last two documents of `status` that were seen."""

    def __init__(self) -> None:
        self._at = 0.0
        self._verifiers: _Counts = {}
        self._sessions: _Counts = {}
        self._acceptance: dict[str, float] = {}
        self._tokens_per_s: dict[str, float] = {}
        self.history: dict[str, deque[float]] = {}
        """Verifier -> its tokens per second, the newest last."""

    def see(self, status: Mapping[str, Any], now: float) -> None:
        """now: seconds on a clock that does not jump."""
        verifiers = {v["id"]: (v["evaluated"], v["accepted"]) for v in status["verifiers"]}
        sessions = {s["id"]: (s["epoch"], s["committed"]) for s in status["sessions"]}
        passed_s = now - self._at
        if self._at and passed_s > 0:
            self._acceptance |= dict(_acceptances(self._verifiers, verifiers))
            self._tokens_per_s = {
                name: (committed - self._sessions[name][1]) / passed_s
                for name, (epoch, committed) in sessions.items()
                if name in self._sessions and self._sessions[name][0] == epoch and committed >= self._sessions[name][1]
            }
        self._acceptance = {name: share for name, share in self._acceptance.items() if name in verifiers}
        known = {v["id"]: v["tokens_per_s"] for v in status["verifiers"]}
        self.history = {name: self.history.get(name, deque(maxlen=HISTORY)) for name in known}
        for name, tokens_per_s in known.items():
            self.history[name].append(tokens_per_s)
        self._at, self._verifiers, self._sessions = now, verifiers, sessions

    def acceptance(self, verifier: Mapping[str, Any]) -> float | None:
        """Of the nodes evaluated since the look before, or since its sessions began where there were none."""
        share: float | None = self._acceptance.get(verifier["id"], verifier["acceptance"])
        return share

    def tokens_per_s(self, session: str) -> float | None:
        """None where it was not seen before, or began again elsewhere."""
        return self._tokens_per_s.get(session)


def _acceptances(before: _Counts, after: _Counts) -> list[tuple[str, float]]:
    """Sessions that end take their counts with them: what shrinks says nothing."""
    found = []
    for name, (evaluated, accepted) in after.items():
        old = before.get(name, (evaluated, accepted))
        nodes, right = evaluated - old[0], accepted - old[1]
        if nodes > 0 and 0 <= right <= nodes:
            found.append((name, right / nodes))
    return found
