"""Make tables for people, with rich. What came from elsewhere cannot steer the terminal: it is shown escaped.

rich is imported where a table is made, so that JSON and YAML do without it.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outrider.core.text import clean

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

SHORT = 12
"""Digits of a hash that tables show: enough to tell releases apart, and to name one."""
_GAP = 2
"""Blanks between two columns."""
_UNLIMITED = 1 << 20
"""Width of a table that fits no terminal: nothing is cut off, and pipes get whole lines."""
_BLANKS = re.compile(r" +((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)
"""Blanks at the end of a line, before the escape codes of its style."""


class Column(NamedTuple):
    """Describe a column of a table."""

    title: str
    cell: Callable[[Any], str | Text]
    """Makes the cell of a row."""
    justify: Literal["left", "right"] = "left"
    spare: int = 0
    """A narrow terminal does without the columns with the greatest number first; never without those with 0."""


number = partial(Column, justify="right")


def table(columns: Sequence[Column], rows: Sequence[Any], width: int | None = None) -> Table:
    """Return a table with a line for each row.

    width: columns of a terminal that it is made to fit, without empty columns and those that matter least. If None, it
    has all columns and is as wide as it needs.
    """
    cells = [[_text(column.cell(row)) for row in rows] for column in columns]
    sizes = [max(len(c.title), *(text.cell_len for text in texts), 0) for c, texts in zip(columns, cells, strict=True)]
    kept = list(range(len(columns)))
    if width is not None:
        kept = [i for i in _fitting(columns, sizes, width) if not rows or any(cells[i])]
    made = _empty_table()
    for i in kept:
        size = sizes[i] if width is None else None
        made.add_column(columns[i].title, justify=columns[i].justify, no_wrap=True, overflow="ellipsis", width=size)
    for row in zip(*(cells[i] for i in kept), strict=True):
        made.add_row(*row)
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


def _fitting(columns: Sequence[Column], sizes: Sequence[int], width: int) -> list[int]:
    """Return the indices of the columns that stay."""
    kept = list(range(len(columns)))
    while sum(sizes[i] + _GAP for i in kept) - _GAP > width and any(columns[i].spare for i in kept):
        kept.remove(max(kept, key=lambda i: columns[i].spare))
    return kept
