"""Write the figures of published runs into README.md and pages of docs; with `--check` fail if one is stale.

A block of a page begins with a comment that names a result of benchmarks/results and holds a template, and ends with
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
are alike, are joined by ` / `. A figure that a run did not have stands as a dash. In a block `results: several` each
figure names its run, as in `{overhead!http_over_sdk:.3f}`.

A run whose code has changed since is marked `of earlier code`, where git can tell. So a change of what a benchmark
measures makes a page stale, until it is generated again. The plot of `capacity` is drawn with the pages, but not
checked.
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

PAGES = tuple(
    results.ROOT / page for page in ("docs/benchmarks.md", "docs/drafting.md", "docs/reliability.md", "README.md")
)
PLOT = results.ROOT / "docs" / "images" / "capacity.png"
SEVERAL = "several"
"""Name of a block whose figures are of several runs."""
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
        name, template, text = found["name"], found["template"], found["text"]
        used: dict[str, Result] = {}

        def figure(match: re.Match[str]) -> str:
            path = match["path"]
            run, _, path = path.partition("!") if name == SEVERAL else (name, "", path)
            used[run] = used.get(run) or _result(run, folder)
            return _figure(used[run], path, match["format"] or "")

        body = _FIGURE.sub(figure, template)
        if name == SEVERAL:
            said = "From " + ", ".join(_named(used[run], text, earlier) for run in sorted(used)) + "."
        else:
            result = used.get(name) or _result(name, folder)
            changed = earlier(result)
            said = recorded(result) + (EARLIER if (EARLIER in text if changed is None else changed) else "")
        return f"<!-- results: {name}\n{template}-->\n{said}\n\n{body}\n<!-- end: results -->"

    if page.count(_BEGIN) != len(_BLOCK.findall(page)):
        raise ValueError(
            f"a block has no end, or no template: {page.count(_BEGIN)} begin, {len(_BLOCK.findall(page))} are whole"
        )
    return _BLOCK.sub(block, page)


def _result(name: str, folder: Path) -> Result:
    result = results.read(name, folder)
    if result is None:
        raise ValueError(f"there is no result of {name}: run `python -m benchmarks {name}`, or remove its figures")
    return result


def _named(result: Result, text: str, earlier: Earlier) -> str:
    """Name the run among others. text: what was generated before, which knows if git does not."""
    when = f"{result.date:%Y-%m-%d}" + (f" in {result.commit[:8]}" if result.commit else "")
    old = f"`{result.name}` ({when}, of earlier code)"
    changed = earlier(result)
    return old if (old in text if changed is None else changed) else f"`{result.name}` ({when})"


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
    if result.not_met:
        text += f" **Goals that were not met: {len(result.not_met)}.**"
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
    stale = []
    try:
        for path in sorted(results.RESULTS.glob("*.json")):
            results.read(path.stem, results.RESULTS)
        for page in PAGES:
            text = page.read_text()
            new = renewed(text, results.RESULTS, of_earlier_code)
            if not options.check:
                page.write_text(new)
            elif new != text:
                stale.append(page)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    if not options.check and (capacity := results.read("capacity", results.RESULTS)) is not None:
        from benchmarks.capacity_plot import draw

        draw(capacity.last["tokens_per_s"], "the shipped draft", PLOT)
    for page in stale:
        print(f"{page} is stale, run `python -m tools.benchmark_tables`", file=sys.stderr)
    if stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
