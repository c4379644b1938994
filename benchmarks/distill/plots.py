"""Draw the acceptance over time by release, and the training's curve. Needs matplotlib, of the `dev` extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distill.answer import DeviceAnswer
from benchmarks.distill.run_log import RunEvent
from benchmarks.support.plotting import new_figure, save

BIN_S = 10.0


def acceptance(
    answers: Sequence[DeviceAnswer], events: Sequence[RunEvent], names: Mapping[str, str], begun: float, path: Path
) -> Path:
    """Draw the share of tokens that devices had proposed, in bins of `BIN_S`, by release (see `names`) and kind."""
    figure = new_figure(12, 7)
    axes = figure.subplots()
    for (release, kind), points in sorted(binned(answers, begun).items()):
        label = f"{names.get(release, release[:12] or 'no draft')}, {kind}"
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    for number, event in enumerate(event for event in events if event.mark):
        axes.axvline(event.unix - begun, color="grey", alpha=0.4, linewidth=0.8)
        height = 0.02 + 0.24 * (number % 2)  # neighbours in time stand apart
        axes.text(event.unix - begun, height, event.mark, rotation=90, ha="right", va="bottom", fontsize=8)
    axes.set(xlabel="seconds", ylabel="share of tokens that the device had proposed", ylim=(0.0, 1.1))
    axes.legend(loc="upper left", ncols=4)
    axes.grid(alpha=0.3)
    return save(figure, path)


def training(lines: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the overlap of draft and target during training: of the batches, and of validation text by class."""
    figure = new_figure(10, 6)
    axes = figure.subplots()
    stepped = [line for line in lines if line.get("validation_overlap") is None]
    axes.plot([line["step"] for line in stepped], [line["overlap"] for line in stepped], alpha=0.5, label="batches")
    measured = [line for line in lines if line.get("validation")]
    for kind in sorted({kind for line in measured for kind in line["validation"]}):
        rows = [(line["step"], line["validation"][kind]["overlap"]) for line in measured if kind in line["validation"]]
        axes.plot(*zip(*rows, strict=True), marker="o", label=f"validation, {kind}")
    axes.set(xlabel="steps", ylabel="overlap with the target, sum min(p, q)")
    axes.legend()
    axes.grid(alpha=0.3)
    return save(figure, path)


def binned(answers: Sequence[DeviceAnswer], begun: float) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return (release, kind) -> (seconds, share proposed) of each bin that has answers."""
    sums: dict[tuple[str, str], dict[int, list[int]]] = {}
    for answer in answers:
        if answer.tokens and not answer.swaps_s:  # a request with a swap belongs to no release
            place = sums.setdefault((answer.release, answer.kind), {})
            total = place.setdefault(int((answer.ended - begun) // BIN_S), [0, 0])
            total[0] += len(answer.tokens)
            total[1] += answer.guessed
    return {
        key: [((at + 0.5) * BIN_S, guessed / tokens) for at, (tokens, guessed) in sorted(bins.items())]
        for key, bins in sums.items()
    }
