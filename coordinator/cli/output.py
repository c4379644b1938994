"""Print what a command has found, as a table or JSON, once or again and again.

Nothing that came from elsewhere can steer the terminal: control characters are escaped. JSON has a message's fields
under their own names. Their names end in their units: `_s`, `_ms`, or `_unix` for seconds of a date.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from coordinator.cli.connection import AdminCall, connect
from outrider.core import text
from outrider.core.errors import Overloaded, Unavailable
from outrider.core.text import clean

ENTRIES_PER_CALL = 1_000
SHORT = 12
"""Digits of a hash that tables show: enough to tell releases apart, and to name one."""
_CLEAR = "\033[H\033[2J"

Document = dict[str, Any]
Columns = Mapping[str, Callable[[Document], str]]
"""Title of a column -> what makes the cell of a document. A column leaves details out."""


@dataclass(frozen=True)
class Result:
    """Holds a command's result for programs and for people, and a notice."""

    document: Mapping[str, Any]
    """The content as JSON shows it."""
    view: str
    """The table or the sentence for people."""
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
    call: AdminCall, request: Any, limit: int, to_document: Callable[[Any], Document], columns: Columns, none: str
) -> Result:
    """Return the list that a request such as ListVerifiersRequest asks for. none: says that it is empty."""
    found, answer = await pages(call, request, limit)
    what, listed = _what(request), list(map(to_document, found))
    more = f"{len(listed)} {what} are shown, and there are more: --limit N shows more of them, --after {answer.next}"
    document = {**fields(answer), what: listed}
    return Result(document, table(columns, listed, none), f"{more} the next" if answer.next else "")


async def pages(call: AdminCall, request: Any, limit: int = sys.maxsize) -> tuple[list[Any], Any]:
    """Return the entries that a request such as ListVerifiersRequest asks for, `limit` at most, and the last answer."""
    found: list[Any] = []
    while True:
        request.limit = min(ENTRIES_PER_CALL, limit - len(found))
        answer = await call(f"List{_what(request).capitalize()}", request)
        found += getattr(answer, _what(request))
        request.after = answer.next
        if not answer.next or len(found) >= limit:
            return found, answer


def _what(request: Any) -> str:
    """Return what a request asks for, as the field of its answer is named."""
    return type(request).__name__.removeprefix("List").removesuffix("Request").lower()


def render(result: Result, form: str, *, one_of_many: bool = False) -> str:
    """Return the text of a result, without control characters but line ends."""
    if form == "json":
        return json.dumps(result.document, indent=None if one_of_many else 2)
    return "\n".join(map(clean, result.view.split("\n")))


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


# --- documents and tables


def fields(message: Message, *without: str) -> Document:
    """Return a message's fields by name, but for those that are absent. MessageToDict would make texts of counts."""
    return {
        field.name: _plain(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.name not in without and not (field.has_presence and not message.HasField(field.name))
    }


def _plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    if isinstance(value, Message):
        return fields(value)
    if isinstance(value, Mapping):
        return {str(key): value[key] for key in sorted(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value


def table(columns: Columns, rows: Sequence[Document], none: str) -> str:
    """Return a table with a line for each row, or `none` if there are no rows."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return text.table(tuple(columns), cells) if rows else none


def facts(document: Document) -> str:
    """Return a line with a name and a value for each entry of a document, also for those of documents in it."""
    named = dict(_flat(document))
    width = max(map(len, named))
    return "\n".join(f"{name:<{width}}  {clean(value)}" for name, value in named.items())


def _flat(document: Document, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if isinstance(value, dict) and value and all(map(str.isdigit, value)):  # a curve, as `estimate` takes it
            yield prefix + name, ",".join(f"{x}:{y:.4g}" for x, y in value.items())
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            said = ", ".join(value) if isinstance(value, list | tuple) else value
            yield prefix + name, "-" if said in (None, "") else f"{said:.10g}" if isinstance(said, float) else str(said)


def share(part: int, whole: int) -> str:
    """Return a share in percent, `-` if it is not known."""
    return f"{part / whole:.0%}" if whole else "-"


def ms(value: float) -> str:
    """Return milliseconds with their unit, `-` for 0: they are not known."""
    return f"{value:.1f} ms" if value else "-"
