"""Provide what the plots of several benchmarks need. Needs matplotlib, of the `dev` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("the plots need matplotlib: pip install 'outrider[dev]'") from error

matplotlib.use("Agg")

__all__ = ["Axes", "Figure", "log_ticks", "new_figure", "save"]


def new_figure(width: float = 11, height: float = 7) -> Figure:
    """Return an empty figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with ticks at these values alone."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG and return its path."""
    figure.savefig(path, dpi=100)
    return path
