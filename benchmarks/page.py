"""Write docs/benchmarks.md: how each benchmark is run and what it measures, and its figures where there is a result.

It also draws the picture of README, from the result of `benchmarks.window`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

**Reproduce.** `python -m benchmarks NAME` runs one, `--quick` in about two minutes, in full in about twenty,
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
"""Rows of a table on the page, first and last among them; the result has all."""
Rows = Sequence[Mapping[str, Any]]


class Shown(NamedTuple):
    """Says which rows and columns of a benchmark's result the page shows."""

    benchmark: str
    columns: str
    """Keys of a row, with spaces between."""
    rows: str = "table"
    """Key of the rows in the result."""
    prepared: Callable[[Rows], Rows] = list
    """Returns the rows that are shown of these."""


def _drafted(rows: Rows) -> Rows:
    return [row for row in rows if row["drafts"]]


def _by_users(rows: Rows) -> Rows:
    """Return a row for each number of users, with the tokens per second by who drafts."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row["users"], {"users": row["users"], "nobody": row["nobody"]})
        one[row["drafts"].replace(" ", "_")] = row["tokens_per_s"]
    return list(found.values())


QUESTIONS = {
    "Is the text the target's own?": (
        Shown("lossless", "way tokens acceptance_length differing"),
        Shown("constrained", "kind ended invalid differing undrafted_ms drafted_ms"),
    ),
    "How fast is one user?": (
        Shown("window", "rtt_ms none adaptive verifier both rounds"),
        Shown("latency", "sampling rtt_ms first_token_ms token_ms speed_up acceptance_length", prepared=_drafted),
    ),
    "How many users does a verifier serve?": (
        Shown("capacity", "users nobody devices verifier both vLLM,_devices vLLM_alone", prepared=_by_users),
        Shown("engine", "engine tokens_per_s_1_at_once tokens_per_s_16_at_once", "beside"),
        Shown("engine", "sessions cohorts idle_share", "simulated"),
    ),
    "What do users notice of failures and of crowds?": (
        Shown("failover", "fault sessions identical pause_s longest_pause_s new_session_s"),
        Shown("overload", "via users tokens_per_s rate wait_s_p99 refused refusal_ms_p99"),
    ),
    "What does a large fleet cost, and what does learning gain?": (
        Shown("control_plane", "coordinators sessions open_ms_p99 decision_age_s_p99 coordinators_ms takeover_s lost"),
        Shown("distill", "domain sampling before after gain from to", "gains"),
    ),
}
"""Question -> what answers it."""
HEADINGS = {
    "way": "who drafts",
    "ended": "ended by themselves",
    "invalid": "invalid of these",
    "undrafted_ms": "ms a token without drafts",
    "drafted_ms": "with drafts",
    "rtt_ms": "round trip (ms)",
    "none": "tokens/s without speculation",
    "nobody": "tokens/s without speculation",
    "adaptive": "speed-up: device drafts",
    "verifier": "verifier drafts",
    "rounds": "device drafts in rounds (calculated)",
    "first_token_ms": "first token (ms)",
    "token_ms": "token (ms)",
    "speed_up": "speed-up",
    "devices": "devices draft",
    "vLLM,_devices": "devices draft for vLLM",
    "tokens_per_s_1_at_once": "tokens/s of one request, without drafts",
    "tokens_per_s_16_at_once": "of 16 at once",
    "cohorts": "two cohorts of sessions",
    "idle_share": "share of the time in which the simulated GPU idles",
    "pause_s": "longest pause (s), median of trials",
    "longest_pause_s": "of all trials",
    "new_session_s": "first token of a new session (s)",
    "via": "refused by",
    "tokens_per_s": "tokens/s of all",
    "rate": "tokens/s of a text",
    "wait_s_p99": "wait for the first token (s), p99",
    "refused": "refused of those who do not wait",
    "refusal_ms_p99": "refusal (ms), p99",
    "open_ms_p99": "opening (ms), p99",
    "decision_age_s_p99": "age of decisions (s), p99",
    "coordinators_ms": "CPU ms by session and second",
    "takeover_s": "takeover (s)",
    "domain": "questions",
    "before": "acceptance length before",
    "from": "gain at 95%, from",
}
"""Column of a table -> its heading, where its name does not say it."""

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
    return "\n".join([head, *(line for question in QUESTIONS for line in _section(question, docstrings, results))])


def _section(question: str, docstrings: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield from (f"## {question}", "")
    for name, group in itertools.groupby(QUESTIONS[question], lambda one: one.benchmark):
        paragraphs = [" ".join(paragraph.split()) for paragraph in docstrings[name].split("\n\n")]
        yield from (f"**{name}.** {paragraphs[0]}", "")
        if (result := results.get(name)) is None:
            continue
        if name == "window":
            yield from ("![Speed by round trip and by who drafts](images/speedup.svg)", "")
        for one in group:
            if rows := result.get(one.rows):
                yield from (*_table(one.columns, one.prepared(rows)), "")
        machine = result["machine"]
        made = f"{result['date']}, commit {result['commit']}, {machine['cores']} cores of {machine['cpu']}."
        caveats = (
            paragraph[len(CAVEAT) :][:1].upper() + paragraph[len(CAVEAT) + 1 :]
            for paragraph in paragraphs
            if paragraph.startswith(CAVEAT)
        )
        yield from (" ".join([result["setting"], *caveats, made]), "")


def _table(columns: str, rows: Rows) -> Iterable[str]:
    """Return the lines of a table with some of the rows, evenly chosen, and the columns of which there is a value."""
    present = [key for key in columns.split() if any(row.get(key) is not None for row in rows)]
    yield "| " + " | ".join(HEADINGS.get(key, key.replace("_", " ")) for key in present) + " |"
    yield "|" + "---|" * len(present)
    shown = min(MOST_ROWS, len(rows))
    for row in (rows[i * (len(rows) - 1) // max(1, shown - 1)] for i in range(shown)):
        yield "| " + " | ".join(_cell(row.get(key)) for key in present) + " |"


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
