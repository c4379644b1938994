"""Write docs/benchmarks.md: how each benchmark is run and what it measures, and its figures where there is a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CAVEAT = "Caveat: "
HEAD = """\
# Benchmarks

<!-- Written by `python -m benchmarks page` from benchmarks/results; changes here are lost. -->

Each benchmark runs on one machine with two cores, with SmolLM2-135M-Instruct and the draft that ships for it, or with
yours: `--models` takes a target's folder or its id on the hub, `--draft` its draft. The prompts are ours
(`benchmarks/prompts.jsonl`), of seven categories, or those of `--prompts FILE`, in our format or that of Spec-Bench,
MT-bench, HumanEval, GSM8K or ShareGPT; the target's chat template is applied to each. `--quick` takes about two
minutes, a full run at most fifteen, and of `distill` 85; `--help` describes the method and the options. `python -m
benchmarks all` runs all of them in at most four hours, and writes their results to `benchmarks/results`. The last line
of each benchmark's output is its result as JSON.
"""
MOST_ROWS = 9
"""Rows of a section's tables on the page, first and last among them; the result has all."""


def page(docstrings: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page. docstrings: of each benchmark's program, by name. results: those there are, by name."""
    return "\n".join([HEAD, *(_section(name, doc, results.get(name)) for name, doc in docstrings.items())])


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
