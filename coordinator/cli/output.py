"""Print what a command has found, as a table (with rich) or JSON, once or again and again.

What came from elsewhere cannot steer the terminal: tables show it escaped. rich is imported where a table is made, so
that JSON does without it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from coordinator.cli.connection import AdminCall, connect
from outrider.core.errors import Overloaded, Unavailable
from outrider.core.text import clean

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

ENTRIES_PER_CALL = 1_000
SHORT = 12
"""Digits of a hash that tables show: enough to tell releases apart, and to name one."""
_GAP = 2
"""Blanks between two columns."""
_UNLIMITED = 1 << 20
"""Width of a table that fits no terminal: nothing is cut off, and pipes get whole lines."""
_BLANKS = re.compile(r" +((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)
"""Blanks at the end of a line, before the escape codes of its style."""
_CLEAR = "\033[H\033[2J"


@dataclass(frozen=True)
class Result:
    """Holds a command's result for programs and for people, and a notice."""

    document: Mapping[str, Any]
    """The content as JSON shows it; its names and units stay as they are."""
    view: Callable[[], RenderableType]
    """Makes the table or the sentence for people, which leaves details out."""
    notice: str = ""
    """Says on stderr what is left out, or what to do next."""


Query = Callable[[argparse.Namespace, AdminCall], Awaitable[Result]]
"""Asks a coordinator for the result of a command line. Raises core errors."""


def show(ask: Query, options: argparse.Namespace) -> int:
    """Print the result of a query, repeatedly with --watch, and return the exit code. Raises core errors."""
    try:
        asyncio.run(_print(options, ask))
    except KeyboardInterrupt:
        if getattr(options, "watch", None) is None:
            raise
    return 0  # Ctrl-C is how watching ends


async def listing(
    call: AdminCall,
    method: str,
    request: Any,
    limit: int,
    to_document: Callable[[Any], Mapping[str, Any]],
    columns: Sequence[Column],
    none: str,
) -> tuple[Result, Any]:
    """Return a list, under the name in `method`, and the last answer of the calls. none: says that it is empty."""
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
        return rendered(result.view())
    except ImportError as error:
        raise ImportError("tables need rich: pip install 'outrider[coordinator]', or use -o json") from error


def note(notice: str) -> None:
    """Print a notice to stderr, unless it is empty."""
    if notice:
        print(f"outrider: {clean(notice)}", file=sys.stderr, flush=True)


async def _print(options: argparse.Namespace, ask: Query) -> None:
    watch_s: float | None = getattr(options, "watch", None)
    async with connect(options, options.timeout_s) as call:
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


# --- tables


class Column(NamedTuple):
    """Describes a column of a table."""

    title: str
    cell: Callable[[Any], str | Text]
    """Makes the cell of a row."""
    justify: Literal["left", "right"] = "left"


number = functools.partial(Column, justify="right")


def table(columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    """Return a table with a line for each row."""
    made = _empty_table()
    for column in columns:
        made.add_column(column.title, justify=column.justify, no_wrap=True)
    for row in rows:
        made.add_row(*(_text(column.cell(row)) for column in columns))
    return made


def facts(known: Mapping[str, str]) -> Table:
    """Return a name and a value on each line."""
    made = _empty_table(show_header=False)
    for name, value in known.items():
        made.add_row(_text(name), _text(value))
    return made


def stacked(*parts: str | Table) -> Group:
    """Return sentences and tables one below the other, a blank line between them."""
    from rich.console import Group

    lines = [line for part in parts for line in (_text(""), _text(part) if isinstance(part, str) else part)]
    return Group(*lines[1:])


def rendered(view: RenderableType) -> str:
    """Return the lines, without blanks at their end, with styles if stdout is a terminal. Raises ImportError."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=sys.stdout.isatty(), width=_UNLIMITED, highlight=False)
    console.print(_text(view) if isinstance(view, str) else view)
    return _BLANKS.sub(r"\1", out.getvalue()).removesuffix("\n")


def share(value: float | None) -> str:
    """Return a share from 0 to 1 in percent, `-` if it is not known."""
    return "-" if value is None else f"{value:.0%}"


def ms(value: float | None) -> str:
    """Return milliseconds with their unit, `-` if they are not known."""
    return "-" if value is None else f"{value:.1f} ms"


def _text(cell: str | Text) -> Text:
    """Return a cell as text that rich does not interpret."""
    from rich.text import Text

    return Text(clean(cell)) if isinstance(cell, str) else cell


def _empty_table(**more: Any) -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", **more)
