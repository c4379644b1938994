"""Write the figures of published runs into docs/benchmarks.md, or with `--check` fail if the page is stale.

A block of the page begins with a comment that names a result of benchmarks/results and holds a template, and ends with
another:

    <!-- results: overhead
    | | for each token |
    |---|---|
    | HTTP over the SDK | {http_over_sdk:.3f} |
    -->
    ...
    <!-- end: results -->

What stands between them is generated: when and how the run was made, then the template with its figures. `{a/b:.2f}` is
the value `b` of `a` in the run's last line, by the format of Python; the figures of a list, or of an object whose keys
are alike, are joined by ` / `. A figure that a run did not have stands as a dash.

A run whose code has changed since is marked `of earlier code`. Git says so where it can, and `--check` never asks it: a
commit to the product leaves the page as it is until somebody generates it again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import Result

PAGE = results.ROOT / "docs" / "benchmarks.md"
EARLIER = " **Of earlier code.**"
_BLOCK = re.compile(
    r"<!-- results: (?P<name>[a-z_-]+)\n(?P<template>.*?)-->\n(?P<text>.*?)<!-- end: results -->", re.DOTALL
)
_FIGURE = re.compile(r"\{(?P<path>[^{}:]+)(?::(?P<format>[^{}]*))?\}")
_BEGIN = "<!-- results:"

Earlier = Callable[[Result], bool | None]
"""Tells whether the code that a run measured has changed since; None if nobody knows."""


def renewed(page: str, folder: Path, earlier: Earlier) -> str:
    """Return the page with the figures of this folder's results. Raises ValueError for a figure that no run has."""

    def block(found: re.Match[str]) -> str:
        name, template = found["name"], found["template"]
        result = results.read(name, folder)
        if result is None:
            raise ValueError(f"there is no result of {name}: run `python -m benchmarks {name}`, or remove its block")
        changed = earlier(result)
        mark = EARLIER if (EARLIER in found["text"] if changed is None else changed) else ""
        body = _FIGURE.sub(lambda figure: _figure(result, figure["path"], figure["format"] or ""), template)
        return f"<!-- results: {name}\n{template}-->\n{recorded(result)}{mark}\n\n{body}\n<!-- end: results -->"

    if page.count(_BEGIN) != len(_BLOCK.findall(page)):
        raise ValueError(
            f"a block has no end, or no template: {page.count(_BEGIN)} begin, {len(_BLOCK.findall(page))} are whole"
        )
    return _BLOCK.sub(block, page)


def recorded(result: Result) -> str:
    """Return a sentence that says when, where and how a run was made."""
    what = ["Recorded"] if result.source == "run" else ["Taken over from an earlier page: recorded"]
    what += [f"{result.date:%Y-%m-%d}", f"in {result.commit[:8]}" if result.commit else "outside a checkout"]
    what.append(f"by `python {' '.join(result.command)}`")
    if where := str(result.machine):
        what.append(f"on {where}")
    if result.seconds is not None:
        what.append(f"in {result.seconds:.0f} s" if result.seconds < 120 else f"in {result.seconds / 60:.0f} minutes")
    text = " ".join(what) + "."
    if result.uncommitted:
        text += " **With changes that are not committed.**"
    return text if not result.status else f"{text} **A criterion does not hold.**"


def _figure(result: Result, path: str, form: str) -> str:
    value: Any = result.last
    for key in path.split("/"):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"the result of {result.name} has no figure {path}: {key} is missing") from None
    return _formatted(value, form, f"{path} of {result.name}")


def _formatted(value: Any, form: str, what: str) -> str:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return " / ".join(_formatted(each, form, what) for each in value)
    if value is None:
        return "-"
    try:
        return format(value, form)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} is {value!r}, which {form!r} does not format: {error}") from None


def of_earlier_code(result: Result) -> bool | None:
    """Ask git whether the code that a run measured has changed since; None if git cannot tell."""
    for benchmark in BENCHMARKS:
        if benchmark.name == result.name:
            return results.changed_since(result.commit, benchmark.measures)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    options = parser.parse_args()
    page = PAGE.read_text()
    try:
        for path in sorted(results.RESULTS.glob("*.json")):
            results.read(path.stem, results.RESULTS)
        new = renewed(page, results.RESULTS, (lambda _: None) if options.check else of_earlier_code)
    except ValueError as error:
        print(f"{PAGE}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if not options.check:
        PAGE.write_text(new)
    elif new != page:
        print(f"{PAGE} is stale, run `python -m tools.benchmark_tables`", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
