"""Draw tokens per second by sessions at once, from what benchmarks.capacity has measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.support.plotting import log_ticks, new_figure, save

STYLES = ("o-", "s--", "^:", "d-.", "v-")
"""Marker and line of the configurations that share a colour."""


def draw(tokens_per_s: Mapping[str, Mapping[str, float]], title: str, path: Path) -> Path:
    """Draw a line for each configuration; those that differ by depth or windows alone have one colour.

    tokens_per_s: configuration -> sessions at once -> tokens per second.
    """
    figure = new_figure()
    axes = figure.subplots()
    drawn: Counter[str] = Counter()
    for name, by_level in tokens_per_s.items():
        family = name.partition(",")[0].rstrip("0123456789 ")
        style = STYLES[drawn[family] % len(STYLES)]
        drawn[family] += 1
        colour = f"C{list(drawn).index(family)}"
        axes.plot([int(level) for level in by_level], list(by_level.values()), style, color=colour, label=name)
    log_ticks(axes, sorted({int(level) for by_level in tokens_per_s.values() for level in by_level}))
    axes.set(xlabel="sessions at once", ylabel="tokens per second of the verifier", title=title)
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize="small")
    return save(figure, path)
