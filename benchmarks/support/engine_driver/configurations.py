"""Define the ways to serve, hold their measurements and derive the figures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.engine_driver.scripted_trees import TreeTally

PLAIN, DEVICE, SERVER = "autoregression", "device", "server draft"
SHARE_OF_BOUND = 0.9


@dataclass(frozen=True)
class Configuration:
    """Describe a way to serve sessions: by whom drafts are made, and with how many nodes."""

    kind: str
    nodes: int = 0
    """Nodes of a session's tree."""
    pruned: bool = False
    """Whether the engine evaluates only those that are worth it."""

    def __str__(self) -> str:
        return f"{self.kind} {self.nodes or ''}{' pruned' if self.pruned else ''}".strip()


@dataclass(frozen=True)
class TimedStep:
    """Hold the times of one step of the engine, and of the draft's work before it."""

    draft_s: float
    verify_s: float
    devices_s: float
    """Time of the scripted devices, which is in no figure."""
    tokens: int
    full: bool
    """Whether every session was in it, with all its nodes unless they are pruned."""


@dataclass(frozen=True)
class TimedRound:
    """Hold the timed steps of a configuration in one round."""

    steps: tuple[TimedStep, ...]
    diverged: frozenset[int] = frozenset()
    """Sessions whose output is not their continuation."""

    @property
    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.steps) / sum(s.draft_s + s.verify_s for s in self.steps)

    @property
    def tokens_per_step(self) -> float:
        return statistics.fmean(s.tokens for s in self.steps)

    @property
    def drafting(self) -> float:
        """Return draft time over verify time."""
        return sum(s.draft_s for s in self.steps) / sum(s.verify_s for s in self.steps)

    def ms(self, part: Callable[[TimedStep], float]) -> float:
        return 1e3 * statistics.fmean(map(part, self.steps))


@dataclass
class LoadLevel:
    """Hold the measurements of all configurations at one number of sessions."""

    rounds: dict[Configuration, list[TimedRound]] = field(default_factory=lambda: defaultdict(list))
    tally: TreeTally = field(default_factory=TreeTally)
    """Tally of the configurations whose trees were evaluated whole."""
    diverged: int = 0
    """Number of sessions that left their continuation, over all rounds."""
    served: int = 0

    def best(self, kind: str) -> Configuration:
        """Return the configuration of this kind with the greatest median."""
        return max((arm for arm in self.rounds if arm.kind == kind), key=self.tokens_per_s)

    def tokens_per_s(self, arm: Configuration) -> float:
        return statistics.median(r.tokens_per_s for r in self.rounds[arm])

    def ratios(self, arm: Configuration, other: Configuration) -> list[float]:
        """Return the tokens per second of one configuration over another's, by round."""
        pairs = zip(self.rounds[arm], self.rounds[other], strict=True)
        return [one.tokens_per_s / two.tokens_per_s for one, two in pairs]

    @property
    def bound(self) -> float:
        best = self.best(SERVER)
        return SHARE_OF_BOUND * (1 + statistics.median(r.drafting for r in self.rounds[best]))


def show(sessions: int, found: LoadLevel) -> None:
    print(f"\n{sessions} sessions: tokens/s, tokens per step; ms of draft, verify and (uncounted) devices; diverged")
    for arm, rounds in found.rounds.items():
        speeds = [r.tokens_per_s for r in rounds]
        draft, verify, devices = (
            statistics.median(r.ms(part) for r in rounds)
            for part in (lambda s: s.draft_s, lambda s: s.verify_s, lambda s: s.devices_s)
        )
        print(
            f"  {arm!s:<22}{statistics.median(speeds):>9.0f} [{min(speeds):.0f} .. {max(speeds):.0f}]"
            f"{statistics.fmean(r.tokens_per_step for r in rounds):>12.1f}{draft:>12.2f}{verify:>9.2f}{devices:>9.2f}"
            f"{sum(len(r.diverged) for r in rounds):>12}"
        )
    tally = found.tally
    print(f"  trees: {tally.rate:.3f} of the tries accepted; {tally.accepted} of {tally.planned} nodes", flush=True)


def summary(levels: Mapping[int, LoadLevel]) -> dict[str, Any]:
    """Return the figures of the last line, by number of sessions."""
    result: dict[str, Any] = {key: {} for key in ("vs_autoregression", "vs_server_draft", "server_draft_bound", "best")}
    for sessions, found in levels.items():
        best, beside = found.best(DEVICE), found.best(SERVER)
        key = str(sessions)
        result["vs_autoregression"][key] = round(statistics.median(found.ratios(best, Configuration(PLAIN))), 3)
        result["vs_server_draft"][key] = round(statistics.median(found.ratios(best, beside)), 3)
        result["server_draft_bound"][key] = round(found.bound, 3)
        result["best"][key] = f"{best}, {beside}"
    served = sum(found.served for found in levels.values())
    tally = TreeTally()
    for found in levels.values():
        tally.add(found.tally)
    result["tree_rate"] = round(tally.rate, 3)
    result["diverged_share"] = round(sum(found.diverged for found in levels.values()) / max(1, served), 4)
    return result
