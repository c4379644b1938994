"""Print what a command has found, as a table, JSON or YAML, once or again and again."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.cli.connection import TIMEOUT_S, AdminCall, connected
from coordinator.cli.tables import Column, rendered, table
from outrider.core.errors import Overloaded, Unavailable
from outrider.core.text import clean

if TYPE_CHECKING:
    from rich.console import RenderableType

ENTRIES_PER_CALL = 1_000
_CLEAR = "\033[H\033[2J"


@dataclass(frozen=True)
class Result:
    """Hold what a command has found: for programs, for people, and a notice."""

    document: Mapping[str, Any]
    """For JSON and YAML; its names and units stay as they are."""
    view: Callable[[], RenderableType]
    """Makes the table or the sentence for people, which leaves details out."""
    notice: str = ""
    """Says on stderr what is left out, or what to do next."""


Query = Callable[[argparse.Namespace, AdminCall], Awaitable[Result]]
Action = Callable[[argparse.Namespace], int]


def query(timeout_s: float = TIMEOUT_S) -> Callable[[Query], Action]:
    """Make a command of what asks a coordinator: it prints the result, repeatedly with --watch, and returns 0.

    timeout_s: for each call. The command raises core errors.
    """

    def command_of(ask: Query) -> Action:
        @functools.wraps(ask)
        def command(options: argparse.Namespace) -> int:
            try:
                asyncio.run(_print(options, ask, timeout_s))
            except KeyboardInterrupt:
                if getattr(options, "watch", None) is None:
                    raise
            return 0  # Ctrl-C is how watching ends

        return command

    return command_of


async def listing(
    call: AdminCall,
    method: str,
    request: Any,
    limit: int,
    to_document: Callable[[Any], Mapping[str, Any]],
    columns: Sequence[Column],
    none: str,
) -> tuple[Result, Any]:
    """Return a list as a result, and the last answer of the calls that it took.

    The answers name their entries as the method does. none: the text for an empty list.
    """
    what = method.removeprefix("List").lower()
    listed: list[Mapping[str, Any]] = []
    while True:
        request.limit = min(ENTRIES_PER_CALL, limit - len(listed))
        answer = await call(method, request)
        listed += map(to_document, getattr(answer, what))
        request.after = answer.next
        if not answer.next or len(listed) >= limit:
            break
    more = f"{len(listed)} {what} are shown, and there are more: --limit N shows more of them, --after {answer.next}"
    return Result(
        {what: listed, "next": answer.next or None},
        lambda: table(columns, listed) if listed else none,
        f"{more} the next" if answer.next else "",
    ), answer


def render(result: Result, form: str, *, one_of_many: bool = False) -> str:
    """Return the text of a result, without control characters but line ends. Raises ImportError for a missing extra."""
    if form == "json":
        return json.dumps(result.document, indent=None if one_of_many else 2)
    try:
        if form == "table":
            return rendered(result.view())
        import yaml
    except ImportError as error:
        needed = "tables need rich" if form == "table" else "-o yaml needs PyYAML"
        raise ImportError(f"{needed}: pip install 'outrider[coordinator]', or use -o json") from error
    text: str = yaml.safe_dump(dict(result.document), sort_keys=False, explicit_start=one_of_many)
    return text.rstrip("\n")


def note(notice: str) -> None:
    """Print a notice to stderr, unless it is empty."""
    if notice:
        print(f"outrider: {clean(notice)}", file=sys.stderr, flush=True)


async def _print(options: argparse.Namespace, ask: Query, timeout_s: float) -> None:
    watch_s: float | None = getattr(options, "watch", None)
    async with connected(options, timeout_s) as call:
        result = await ask(options, call)  # what is wrong from the start ends the command
        while True:
            text = render(result, options.output, one_of_many=watch_s is not None)
            if watch_s is not None and options.output == "table":
                text = f"{_CLEAR}{text}" if sys.stdout.isatty() else f"{text}\n"
            print(text, flush=True)
            note(result.notice)
            if watch_s is None:
                return
            result = await _next(options, ask, call, watch_s)


async def _next(options: argparse.Namespace, ask: Query, call: AdminCall, watch_s: float) -> Result:
    """Return the next result; a coordinator that is away for a moment is no reason to stop watching."""
    while True:
        await asyncio.sleep(watch_s)
        try:
            return await ask(options, call)
        except (Unavailable, Overloaded) as error:
            note(str(error))
