"""How what was asked is shown: as a table, JSON or YAML, once or again and again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.cli.connection import TIMEOUT_S, Ask, line, link_options
from coordinator.cli.values import at_most, seconds
from outrider.core.errors import Overloaded, Unavailable
from outrider.core.text import clean

WATCH_S = 2.0
PAGE = 1_000
"""Entries that are asked for at once."""
LIMIT = 500
"""Entries that a list shows unless told otherwise."""
MAX_LIMIT = 100_000
_CLEAR = "\033[H\033[2J"


@dataclass(frozen=True)
class Shown:
    """What a command found."""

    document: Mapping[str, Any]
    """For JSON and YAML; its names and units stay as they are."""
    text: str
    """The same for people, without the details."""
    notice: str = ""
    """What is left out, or what to do next; goes to stderr."""


Look = Callable[[Ask], Awaitable[Shown]]


def form_option(parser: argparse.ArgumentParser) -> None:
    """`-o`."""
    text = "how to print what was found [default: table]"
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help=text)


def output_options(parser: argparse.ArgumentParser, *, watch: bool = False) -> None:
    """`-o`, the way to the coordinator and, for what can change, `--watch`."""
    form_option(parser)
    if watch:
        parser.add_argument(
            "-w",
            "--watch",
            type=seconds,
            nargs="?",
            const=WATCH_S,
            metavar="SECONDS",
            help="again and again, until Ctrl-C; JSON comes as one line each time "
            f"[default: once; {WATCH_S:g} without SECONDS]",
        )
    link_options(parser)


def page_options(parser: argparse.ArgumentParser) -> None:
    """How much of a list."""
    parser.add_argument(
        "--limit", type=at_most(MAX_LIMIT), default=LIMIT, metavar="N", help=f"show so many [default: {LIMIT}]"
    )
    parser.add_argument(
        "--after", default="", metavar="NEXT", help="go on after what a list before has shown [default: begin]"
    )


def show(options: argparse.Namespace, look: Look, *, timeout_s: float = TIMEOUT_S) -> int:
    """The exit code. Raises core errors."""
    try:
        asyncio.run(_show(options, look, timeout_s))
    except KeyboardInterrupt:
        if _interval_s(options) is None:
            raise
    return 0  # Ctrl-C is how watching ends


async def pages(ask: Ask, method: str, request: Any, field: str, limit: int) -> tuple[list[Any], str]:
    """The entries of a list in several answers, and where more would begin: "" where there are none."""
    found: list[Any] = []
    while True:
        request.limit = min(PAGE, limit - len(found))
        answer = await ask(method, request)
        found += getattr(answer, field)
        request.after = answer.next
        if not answer.next or len(found) >= limit:
            return found, answer.next


def cut(what: str, shown: int, following: str) -> str:
    """The notice of a list that goes on."""
    if not following:
        return ""
    return f"{shown} {what} are shown, and there are more: --limit N shows more of them, --after {following} the next"


def render(shown: Shown, form: str, *, one_of_many: bool = False) -> str:
    """As text without control characters but line ends."""
    if form == "json":
        return json.dumps(shown.document, indent=None if one_of_many else 2)
    if form == "yaml":
        try:
            import yaml
        except ImportError as error:
            raise ImportError("-o yaml needs PyYAML: pip install 'outrider[coordinator]'") from error
        text: str = yaml.safe_dump(dict(shown.document), sort_keys=False, explicit_start=one_of_many)
        return text.rstrip("\n")
    return shown.text


async def _show(options: argparse.Namespace, look: Look, timeout_s: float) -> None:
    interval_s = _interval_s(options)
    async with line(options, timeout_s=timeout_s) as ask:
        shown = await look(ask)  # what is wrong from the start ends it
        if interval_s is None:
            print(render(shown, options.output), flush=True)
            note(shown.notice)
            return
        while True:
            _print_one(shown, options.output)
            shown = await _next(look, ask, interval_s)


async def _next(look: Look, ask: Ask, interval_s: float) -> Shown:
    """A coordinator that is away for a moment is no reason to stop watching."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            return await look(ask)
        except (Unavailable, Overloaded) as error:
            note(str(error))


def _print_one(shown: Shown, form: str) -> None:
    text = render(shown, form, one_of_many=True)
    if form == "table":
        text = f"{_CLEAR}{text}" if sys.stdout.isatty() else f"{text}\n"
    print(text, flush=True)
    note(shown.notice)


def _interval_s(options: argparse.Namespace) -> float | None:
    interval_s: float | None = getattr(options, "watch", None)
    return interval_s


def note(notice: str) -> None:
    """To stderr, unless it is empty."""
    if notice:
        print(f"outrider: {clean(notice)}", file=sys.stderr, flush=True)
