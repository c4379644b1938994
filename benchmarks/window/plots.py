"""Draw the figures of the windows benchmark: each function takes what `benchmarks.window` saved, and writes one PNG.

Needs matplotlib, of the `dev` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.plotting import Axes, Figure, log_ticks, new_figure, save

Row = Mapping[str, Any]
COLOURS = {"good": "tab:blue", "narrow": "tab:orange"}
PANELS = (("real CPU", 1), ("real CPU", 8), ("paced", 1), ("paced", 8))


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every plot for which the result has figures."""
    made = []
    pictures: dict[str, tuple[str, Callable[[Any, Figure], None]]] = {
        "speedup": ("cells", lambda data, figure: _speedup(data, result.get("against") or (), figure)),
        "bytes": ("cells", _bytes),
        "statics": ("statics", _statics),
        "transition": ("series", _transition),
        "reliability": ("curve", _reliability),
    }
    for name, (needed, picture) in pictures.items():
        if result.get(needed):
            figure = new_figure()
            picture(result[needed], figure)
            made.append(save(figure, folder / f"window_{name}.png"))
    return made


def _panels(cells: Sequence[Row], figure: Figure, each: Callable[[Axes, str, Sequence[Row]], None]) -> list[Axes]:
    """Draw a panel for each machine, over RTT; `each` draws one draft's rows into it."""
    found = []
    for axes, (verifier, sessions) in zip(figure.subplots(2, 2, sharex=True).flat, PANELS, strict=True):
        here = [cell for cell in cells if (cell["verifier"], cell["sessions"]) == (verifier, sessions)]
        for draft in COLOURS:
            if rows := sorted((c for c in here if c["draft"] == draft), key=lambda c: float(c["rtt_ms"])):
                each(axes, draft, rows)
        axes.set_title(
            f"{'PACED' if verifier == 'paced' else verifier}, {sessions} session{'s' if sessions > 1 else ''} at once"
        )
        log_ticks(axes, sorted({float(cell["rtt_ms"]) for cell in cells}))
        axes.set_xlabel("round trip, ms")
        found.append(axes)
    return found


def _speedup(cells: Sequence[Row], against: Sequence[Row], figure: Figure) -> None:
    def each(axes: Axes, draft: str, rows: Sequence[Row]) -> None:
        middle = [row["vs_streaming"] for row in rows]
        below = [row["vs_streaming"] - row["vs_streaming_lower95"] for row in rows]
        above = [row["vs_streaming_upper95"] - row["vs_streaming"] for row in rows]
        at = [row["rtt_ms"] for row in rows]
        axes.errorbar(at, middle, (below, above), marker="o", capsize=4, color=COLOURS[draft], label=f"{draft} draft")

    panels = _panels(cells, figure, each)
    if against:
        rtts = [row["rtt_ms"] for row in against]
        paced = panels[PANELS.index(("paced", 1))]
        paced.plot(rtts, [row["vs_streaming"] for row in against], "s-", color="tab:green", label="match near 0.8")
        paced.plot(rtts, [row["predicted"] for row in against], "--", color="black", label="model, match near 0.8")
    for axes in panels:
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set_ylabel("speed over streaming")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(
        "Adaptive windows over plain streaming, on the real CPU and PACED (median over prompts, 95% interval)"
    )


def _bytes(cells: Sequence[Row], figure: Figure) -> None:
    def each(axes: Axes, draft: str, rows: Sequence[Row]) -> None:
        at = [row["rtt_ms"] for row in rows]
        for way, style in (("up", "o-"), ("down", "x--")):
            values = [row[f"bytes_{way}_per_token"] for row in rows]
            axes.plot(at, values, style, color=COLOURS[draft], label=f"{way}, {draft} draft")

    for axes in _panels(cells, figure, each):
        axes.axhline(40.0, color="grey", linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("bytes a token")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(
        "Bytes on the line per committed token, real CPU and PACED: payload, gRPC and HTTP/2 (wanted: under 40 up)"
    )


def _statics(cells: Sequence[Row], figure: Figure) -> None:
    axes = figure.subplots()
    configurations = list(cells[0]["over"])
    height = 0.8 / len(configurations)
    for i, configuration in enumerate(configurations):
        at = [row + i * height for row in range(len(cells))]
        axes.barh(at, [cell["over"][configuration] for cell in cells], height, label=configuration)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(0.95, color="grey", linewidth=1, linestyle=":")
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(cells))], [cell["cell"] for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel("speed of adaptive over the static window (left of 1: the static one is faster)")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle("Adaptive windows against static ones, on the real CPU and PACED")


def _transition(series: Sequence[Row], figure: Figure) -> None:
    grid = figure.subplots(2, len(series), sharex="col", squeeze=False)
    for (speed, window), line in zip(zip(*grid, strict=True), series, strict=True):
        for arm in ("adaptive", "streaming"):
            speed.plot(*zip(*line[arm], strict=True), label=arm)
        if line["k"]:
            window.step(*zip(*line["k"], strict=True), where="post", label="k", color="tab:red")
            window.step(*zip(*line["depth"], strict=True), where="post", label="depth", color="tab:purple")
            window.legend(fontsize="small")
        for axes in (speed, window):
            for at_s, what in line["changes"]:
                axes.axvline(at_s, color="grey", linestyle=":")
                axes.annotate(what, (at_s, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8)
        speed.set_title(line["name"])
        speed.set_ylabel("tokens/s in the second before")
        window.set_ylabel("levels")
        window.set_xlabel("seconds of the session")
        speed.legend(fontsize="small")
    figure.suptitle("While things change in mid-session, PACED")


def _reliability(curve: Sequence[Sequence[float]], figure: Figure) -> None:
    axes = figure.subplots()
    predicted, happened = [point[0] for point in curve], [point[1] for point in curve]
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    axes.plot(predicted, happened, "o-")
    axes.set_xlabel("path acceptance as estimated when the node was handed over (bins of equally many)")
    axes.set_ylabel("share that became text")
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)
    figure.suptitle(
        f"Reliability of the device's estimates, real CPU and PACED, {sum(int(point[2]) for point in curve)} nodes"
    )
