"""Write text for people: nothing in it steers a terminal or tells credentials; counts, short ids, and tables."""

from __future__ import annotations

import argparse
import re
import unicodedata
from collections.abc import Sequence
from typing import NoReturn

_CREDENTIALS = re.compile(r"(?<=://)([^\s/@]*:(?!\d+([/\s]|[,;]\s|$)).*@|\S*@|:\S+)")
"""What stands before a URL's host, whatever characters a password has that was not encoded."""
_WITHOUT_SCHEME = re.compile(r"(?<![^\s'\"/@:=])[^\s'\"/@:=]{0,256}:(?!//|\d+([/\s]|[,;]))[^\s'\"]{1,256}@")
"""Lengths are bounded, since each beginning is tried."""
_SECRET_FLAG = re.compile(r"(--(?!max)[\w-]*(?:key|pass|secret|token)(?!s)[\w-]*[ =])(?!--)\S+")
_SECRET_PARAMETER = re.compile(r"([?&][\w-]*(?:pass|secret|token)[\w-]*=)[^&\s'\"]*")


def clean(text: str) -> str:
    r"""Escape control, format and unassigned characters and line separators as `\x1b` or `\u202e`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def masked(text: str) -> str:
    """Replace the credentials of URLs, or of USER:PASSWORD@HOST, in a text: messages and logs must not hold any."""
    if "://" in text or "@" in text:
        text = _WITHOUT_SCHEME.sub("***@", _CREDENTIALS.sub("***@", text))
    return _SECRET_PARAMETER.sub(r"\1***", text)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints do not repeat credentials."""

    def error(self, message: str) -> NoReturn:
        super().error(_SECRET_FLAG.sub(r"\1***", masked(message)))


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, of which there is one or any other number: "1 row", "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short_id(session_id: str) -> str:
    """Return the beginning of a session's id, by which logs and errors name it: enough to tell sessions apart.

    Where there are no tickets, who knows the whole id may attach. The rest of a random id of 128 bits is still 96.
    """
    return session_id[:8]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a heading and a line for each row, every column as wide as it needs to be."""
    cells = [tuple(columns), *(tuple(map(clean, row)) for row in rows)]
    widths = [max(_width(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _escaped(c: str) -> str:
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _width(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
