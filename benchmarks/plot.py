"""Draw the picture of README from the result of `benchmarks.window`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINES = {
    "both": ("device and verifier draft", "tab:blue", "o-"),
    "adaptive": ("device drafts", "tab:green", "s-"),
    "verifier": ("verifier drafts", "tab:orange", "^-"),
    "rounds": ("device drafts in rounds (calculated)", "tab:red", "x--"),
}
"""Column of the result -> what it is called in the picture, its colour, and its marker and line."""


def draw_speedups(result: Mapping[str, Any], file: Path) -> None:
    """Write a picture (SVG) of the speed over no speculation by round trip. result: of `benchmarks.window`."""
    import matplotlib  # only whoever draws needs it

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "outrider", "svg.fonttype": "none"}  # the same figures make the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    for column, (label, colour, style) in LINES.items():
        points = [(row["rtt_ms"], row[column]) for row in result["table"]]
        axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    axes.axhline(1.0, color="grey", linewidth=1, label="no speculation")
    axes.set(xlabel="round trip between device and verifier (ms)", ylabel="speed over no speculation", ylim=(0, None))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
