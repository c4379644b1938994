"""Write docs/benchmarks.md: how each benchmark is run and what it measures, and its figures where there is a result."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

CAVEAT = "Caveat: "
HEAD = """\
# Benchmarks

<!-- Written by `python -m benchmarks page` from benchmarks/results; changes here are lost. -->

Each benchmark runs on one machine with two cores, with the small pair in `models/` or with yours (`--models DIR`, which
has `target/` and `draft.gguf`). `--quick` takes at most three minutes, a full run at most fifteen; `--help` describes
the method and the options. `python -m benchmarks all` runs all of them in at most two hours, and writes their results
to `benchmarks/results`. The last line of each benchmark's output is its result as JSON.
"""
MOST_ROWS = 12
"""Rows of a table on the page; the result has all."""


def page(docstrings: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page. docstrings: of each benchmark's program, by name. results: those there are, by name."""
    return "\n".join([HEAD, *(_section(name, doc, results.get(name)) for name, doc in docstrings.items())])


def _section(name: str, doc: str, result: Mapping[str, Any] | None) -> str:
    paragraphs = [" ".join(paragraph.split()) for paragraph in doc.split("\n\n")]
    lines = [f"## {name}", "", *_wrapped(paragraphs[0]), "", f"`python -m benchmarks.{name}`", ""]
    if result is not None:
        machine = result["machine"]
        made = f"{result['date']}, commit {result['commit']}, {machine['cores']} cores of {machine['cpu']}."
        caveats = (paragraph.removeprefix(CAVEAT) for paragraph in paragraphs if paragraph.startswith(CAVEAT))
        for rows in result.values():
            if isinstance(rows, list) and rows:
                lines += [*_table(rows), ""]
        lines += [*_wrapped(" ".join([result["setting"], *caveats, made])), ""]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Return the lines of a table whose columns are the rows' keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    yield "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows[:MOST_ROWS]:
        yield "| " + " | ".join(_cell(row.get(column)) for column in columns) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)
