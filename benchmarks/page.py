"""Write docs/benchmarks.md: how each benchmark is run and what it measures, and its figures where there is a result.

It also draws the picture of README, from the result of `benchmarks.window`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CAVEAT = "Caveat: "
HEAD = """\
# Benchmarks

<!-- Written by `python -m benchmarks page` from benchmarks/results; changes here are lost. -->

{figures} Your own pair has [its own](bench.md).

**Setup.** Each benchmark runs on one machine with two cores, with SmolLM2-135M-Instruct and the draft that ships for
it. The prompts are ours (`benchmarks/prompts.jsonl`), of seven categories, in the target's chat template. Links are
emulated, and nobody else uses the machine. Both sides of a comparison run in the same run, in turn.

| metric | meaning |
|---|---|
| first token | from the request to its first token |
| token | time per output token, from the first one on |
| tokens/s | of one user, or of all users together |
| acceptance length | mean tokens of a step of the target; 1 without drafts |
| acceptance rate | share of evaluated draft tokens that were accepted |
| speed-up | over the same service without speculation |

**Reproduce.** `python -m benchmarks NAME` runs one, `--quick` in about two minutes, in full in at most twenty,
`distill` in 30. `python -m benchmarks all` runs all of them and writes their results to `benchmarks/results`.
`--models` takes another target's folder or its id on the hub, `--draft` its draft, and `--prompts FILE` other
prompts, also of Spec-Bench, MT-bench, HumanEval, GSM8K or ShareGPT. `--help` describes each method.

**Limits.** The target is small, and its greedy texts often end in a loop, which flatters every draft. Devices and
verifier share a machine, so drafting takes time from the verifier that it would not take in production. What ran on a
GPU says so.
"""
FIGURES = "These figures are reference points, not peaks: another machine has others."
NO_FIGURES = "**This page has no figures yet**: they are measured with the release."
MOST_ROWS = 8
"""Rows of a section's tables on the page, first and last among them; the result has all."""

LINES = {
    "both": ("device and verifier draft", "tab:blue", "o-"),
    "adaptive": ("device drafts", "tab:green", "s-"),
    "verifier": ("verifier drafts", "tab:orange", "^-"),
    "rounds": ("device drafts in rounds (calculated)", "tab:red", "x--"),
}
"""Column of the result -> what it is called in the picture, its colour, and its marker and line."""


def page(docstrings: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page. docstrings: of each benchmark's program, by name. results: those there are, by name."""
    head = HEAD.format(figures=FIGURES if results else NO_FIGURES)
    return "\n".join([head, *(_section(name, doc, results.get(name)) for name, doc in docstrings.items())])


def _section(name: str, doc: str, result: Mapping[str, Any] | None) -> str:
    paragraphs = [" ".join(paragraph.split()) for paragraph in doc.split("\n\n")]
    lines = [f"## {name}", "", f"{paragraphs[0]} Run `python -m benchmarks.{name}`.", ""]
    if result is not None:
        machine = result["machine"]
        made = f"{result['date']}, commit {result['commit']}, {machine['cores']} cores of {machine['cpu']}."
        caveats = (paragraph.removeprefix(CAVEAT) for paragraph in paragraphs if paragraph.startswith(CAVEAT))
        tables = [rows for rows in result.values() if isinstance(rows, list) and rows]
        for rows in tables:
            lines += [*_table(rows, MOST_ROWS // len(tables)), ""]
        lines += [" ".join([result["setting"], *caveats, made]), ""]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], most: int) -> Iterable[str]:
    """Return the lines of a table whose columns are the rows' keys, with so many of the rows, evenly chosen."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    yield "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"
    yield "|" + "---|" * len(columns)
    shown = min(most, len(rows))
    for row in (rows[i * (len(rows) - 1) // max(1, shown - 1)] for i in range(shown)):
        yield "| " + " | ".join(_cell(row.get(column)) for column in columns) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


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
