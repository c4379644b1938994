"""When to train: what the traffic log says of each class, and a pure decision over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

FRESH_SHARE = 0.1
"""Of the new tokens: a class with fewer is not what a run is trained for."""
ADAPTS = 0.5
"""Weight of a run's traffic in what acceptance is usual: two or three runs and older ones are forgotten."""


class Seen(BaseModel, frozen=True):
    """One class of traffic since some time."""

    tokens: int = 0
    judged: int = 0
    """Tokens of sessions that drafted with the release that is judged."""
    guessed: int = 0
    """Of those, tokens that the device had guessed."""

    @property
    def acceptance(self) -> float:
        return self.guessed / self.judged if self.judged else 0.0

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            tokens=self.tokens + other.tokens, judged=self.judged + other.judged, guessed=self.guessed + other.guessed
        )


@dataclass(frozen=True)
class WatchRule:
    """See `DistillConfig`."""

    fresh_tokens: int = 200_000
    alarm_tokens: int = 20_000
    alarm_fall: float = 0.1
    run_tokens: int = 60_000


@dataclass(frozen=True)
class Cause:
    """Why a run begins."""

    text: str
    fresh: tuple[str, ...]
    """Classes that it is for."""


def due(seen: Mapping[str, Seen], usual: Mapping[str, float], rule: WatchRule) -> Cause | None:
    """Whether to train now.

    seen: by class, since the last run. usual: acceptance by class as earlier runs found it; a class that is new is
    compared with the mean of the others.
    """
    total = sum(one.tokens for one in seen.values())
    fresh = tuple(sorted(name for name, one in seen.items() if one.tokens >= FRESH_SHARE * total))
    for name, text in alarms(seen, usual, rule).items():
        if seen[name].tokens >= rule.run_tokens or total >= rule.fresh_tokens:
            return Cause(text, tuple(sorted({*fresh, name})))
    if total >= rule.fresh_tokens:
        return Cause(f"{total} fresh tokens", fresh)
    return None


def alarms(seen: Mapping[str, Seen], usual: Mapping[str, float], rule: WatchRule) -> dict[str, str]:
    """Classes whose acceptance has fallen, each with the figures, whether or not there is enough to learn from."""
    found = {}
    for name, one in sorted(seen.items()):
        expected = usual.get(name, sum(usual.values()) / len(usual) if usual else 0.0)
        if one.judged >= rule.alarm_tokens and one.acceptance < expected - rule.alarm_fall:
            found[name] = f"acceptance on class {name!r} is {one.acceptance:.2f}, usual is {expected:.2f}"
    return found


def adapted(usual: Mapping[str, float], seen: Mapping[str, Seen], rule: WatchRule) -> dict[str, float]:
    """What is usual after a run, by class. One with little traffic stays as it was."""
    new = dict(usual)
    for name, one in seen.items():
        if one.judged >= rule.alarm_tokens:
            new[name] = one.acceptance + (1 - ADAPTS) * (usual.get(name, one.acceptance) - one.acceptance)
    return new
