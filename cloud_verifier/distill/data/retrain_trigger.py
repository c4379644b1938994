"""Decide when to train: a pure function of what the traffic log holds of each traffic class."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from cloud_verifier.distill.config import DistillConfig

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
