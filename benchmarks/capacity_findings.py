"""Compare what the configurations of a capacity run delivered with one another and with the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support import proc
from benchmarks.support.engine_options import VLLM
from benchmarks.support.harness import Criterion, spread

PLAIN, DEVICE, SERVER, COLOCATED, BOTH = "autoregression", "device", "server draft", "co-located", "both"
CONTROLLED = "device, controlled"
WANTED = {1: 1.6, 4: 1.5, 16: 1.15}
"""Sessions -> the ratio of `device` to `autoregression` that is expected at least."""
SHARE_OF_BOUND = 0.9
BOTH_KEY = "both_over_best"
BOTH_CONTROLLED = "both, controlled"


@dataclass(frozen=True)
class LoadWindow:
    """Count what was delivered while as many sessions as asked for ran all the time."""

    tokens_per_s: float
    greedy_per_s: float
    """Tokens per second if all sessions were greedy ones: those of greedy sessions, over the share of the time that
    such sessions ran."""
    sampled_per_s: float
    """The same of sampled sessions."""
    tokens_per_step: float
    clients_core_busy: float
    """Share of the time for which the clients' core was busy, whatever ran there."""
    parts_ms: Mapping[str, float]
    """The parts of the verifier's recent steps, while all sessions ran."""


@dataclass
class MeasuredCell:
    """Hold the measurements of one configuration at one number of sessions, by round."""

    windows: list[LoadWindow] = field(default_factory=list)

    @property
    def drafting(self) -> float:
        """Return draft time over verify time in the verifier's own steps."""
        shares = []
        for window in self.windows:
            verify_ms = sum(ms for part, ms in window.parts_ms.items() if part not in ("between", "draft"))
            shares.append(window.parts_ms["draft"] / verify_ms)
        return statistics.median(shares)

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(window, name) for window in self.windows))


Cells = dict[tuple[str, int], MeasuredCell]


SPEEDS = {"greedy": "greedy_per_s", "sampled": "sampled_per_s"}
"""Sampling of the sessions that count -> the figure of a window."""


def ratios(cells: Cells, level: int, over: str, arm: str = DEVICE, speed: str = "tokens_per_s") -> list[float]:
    """Return the speed with device drafts over that of another configuration, by round."""
    pairs = zip(cells[arm, level].windows, cells[over, level].windows, strict=True)
    return [getattr(device, speed) / getattr(other, speed) for device, other in pairs]


def best(cells: Cells, level: int, *prefixes: str, speed: str = "tokens_per_s") -> str:
    """Return the configuration with the greatest median, of those whose name begins with one of these."""
    names = {name for name, _ in cells if name.startswith(prefixes)}
    return max(names, key=lambda name: cells[name, level].median(speed))


def by_sampling(cells: Cells, levels: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Print and return, of greedy and of sampled sessions apart, `both` over the best of all others by level."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for sampling, speed in SPEEDS.items():
        found[sampling] = {BOTH_KEY: {}, "both_controlled_over_best": {}, "vs_autoregression": {}}
        for level in levels:
            other = best(cells, level, PLAIN, DEVICE, SERVER, COLOCATED, speed=speed)
            compared = {
                BOTH_KEY: (other, BOTH),
                "both_controlled_over_best": (other, BOTH_CONTROLLED),
                "vs_autoregression": (PLAIN, BOTH),
            }
            each = {key: ratios(cells, level, over, arm, speed) for key, (over, arm) in compared.items()}
            for key, of in each.items():
                found[sampling][key][str(level)] = round(statistics.median(of), 3)
            print(
                f"{level:>3} {sampling} sessions: both over {other}, the best of all others, {spread(each[BOTH_KEY])},"
                f" controlled {spread(each['both_controlled_over_best'])};"
                f" over autoregression {spread(each['vs_autoregression'])}"
            )
    return found


def comparisons(cells: Cells, level: int) -> dict[str, tuple[str, str]]:
    """Return key of the last line -> the configuration that is compared, and that which it is compared with."""
    without_devices = best(cells, level, PLAIN, SERVER, COLOCATED)
    other = best(cells, level, PLAIN, DEVICE, SERVER, COLOCATED)
    return {
        "vs_autoregression": (DEVICE, PLAIN),
        "controlled_vs_autoregression": (CONTROLLED, PLAIN),
        "vs_server_draft": (DEVICE, best(cells, level, SERVER, COLOCATED)),
        "vs_without_devices": (DEVICE, without_devices),
        "controlled_vs_without_devices": (CONTROLLED, without_devices),
        "both_vs_without_devices": (BOTH, without_devices),
        "both_controlled_vs_without_devices": (BOTH_CONTROLLED, without_devices),
        BOTH_KEY: (BOTH, other),
        "both_controlled_over_best": (BOTH_CONTROLLED, other),
    }


def report(title: str, cells: Cells, levels: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Print a table; return the ratios by level, and by configuration and level what a second and a step bring."""
    print(f"\n{title}: tokens/s (tokens per step) [share of the time for which the clients' core was busy]")
    names = list(dict.fromkeys(name for name, _ in cells))
    for name in names:
        row = [f"{name:<22}"]
        for level in levels:
            cell = cells[name, level]
            speed, per_step, busy = map(cell.median, ("tokens_per_s", "tokens_per_step", "clients_core_busy"))
            row.append(f"{level:>3}: {speed:7.1f} ({per_step:.2f}) [{busy:.2f}]")
        print("  ".join(row))
    found: dict[str, dict[str, Any]] = {}
    for level in levels:
        always = best(cells, level, SERVER)
        drafting = cells[always, level].drafting
        bound = SHARE_OF_BOUND * (1.0 + drafting)
        found.setdefault("server_draft_bound", {})[str(level)] = round(bound, 3)
        wanted = {"vs_server_draft": bound, BOTH_KEY: 1.0}
        if level in WANTED:
            wanted["vs_autoregression"] = WANTED[level]
        print(f"{level:>3} sessions: {always} drafts for {drafting:.2f} of its verify time")
        for key, (arm, over) in comparisons(cells, level).items():
            each = ratios(cells, level, over, arm)
            found.setdefault(key, {})[str(level)] = round(statistics.median(each), 3)
            goal = f", wanted >= {wanted[key]:.2f}" if key in wanted else ""
            print(f"     {key}: {arm} over {over} {spread(each)}{goal}")
    for figure, digits in (("tokens_per_s", 1), ("tokens_per_step", 3), ("clients_core_busy", 2)):
        found[figure] = {
            name: {str(level): round(cells[name, level].median(figure), digits) for level in levels} for name in names
        }
    return found


def report_vllm(cells: Cells, levels: Sequence[int]) -> dict[str, dict[str, float]]:
    """Print how vLLM's verifiers compare with ours, and return the ratios by level."""
    compared = {
        "autoregression_over_torch": (f"{VLLM} {PLAIN}", PLAIN),
        "device_over_torch": (f"{VLLM} {DEVICE}", DEVICE),
        "controlled_over_torch": (f"{VLLM} {CONTROLLED}", CONTROLLED),
        "vs_autoregression": (f"{VLLM} {DEVICE}", f"{VLLM} {PLAIN}"),
        "controlled_vs_autoregression": (f"{VLLM} {CONTROLLED}", f"{VLLM} {PLAIN}"),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (arm, over) in compared.items():
        each = {level: ratios(cells, level, over, arm) for level in levels}
        print(f"{arm} over {over}: " + ", ".join(f"{level} sessions {spread(of)}" for level, of in each.items()))
        found[name] = {str(level): round(statistics.median(of), 3) for level, of in each.items()}
    for name in ("tokens_per_step", "vllm_tokens_per_step"):
        arm = DEVICE if name == "tokens_per_step" else f"{VLLM} {DEVICE}"
        found[name] = {str(level): round(cells[arm, level].median("tokens_per_step"), 3) for level in levels}
    return found


def criteria(result: Mapping[str, Any]) -> list[Criterion]:
    """Return what should hold with both drafts: devices' nodes beside the verifier's own lose nothing, and the clients
    are not what limits a figure."""
    found = {"": result, "heavy draft, ": result.get("heavy_draft", {})}
    apart = {
        f"{name}{sampling}, ": figures
        for name, each in found.items()
        for sampling, figures in each.get("by_sampling", {}).items()
    }
    full = [
        f"{name}{arm} with {level}"
        for name, figures in found.items()
        for arm, each in figures.get("clients_core_busy", {}).items()
        for level, share in each.items()
        if share > proc.MOST_BUSY
    ]
    busy = f"numbers of sessions with which the clients' core was busy for more than {proc.MOST_BUSY:.0%} of the time"
    return [Criterion(busy, "none", "; ".join(full) or "none", not full, enforced_from=None)] + [
        Criterion.bound(
            f"{name}{level} sessions, both over the best of all others", ratio, at_least=1.0, enforced_from=None
        )
        for name, figures in (found | apart).items()
        for level, ratio in figures.get(BOTH_KEY, {}).items()
    ]
