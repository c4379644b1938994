"""Check single values that come over the wire. Every refusal is a BadRequest that names field, value and bound."""

from __future__ import annotations

import re

from outrider.core.errors import BadRequest

MAX_LABEL = 64
_WORD = re.compile(r"[A-Za-z0-9._-]*")


def at_most(field: str, value: int, most: int) -> None:
    """Raise BadRequest if the value is above the bound."""
    if value > most:
        raise BadRequest.bound(field, value, f"at most {most}")


def text(field: str, value: str, least: int, most: int) -> str:
    """Return a text of `least` to `most` printable characters, which logs may show. Raises BadRequest for any other."""
    if not least <= len(value) <= most or not value.isprintable():
        shown = repr(value[:MAX_LABEL]) if len(value) <= most else f"{len(value)} characters long"
        raise BadRequest.bound(field, shown, f"{least} to {most} printable characters")
    return value


def is_label(value: str) -> bool:
    """Return whether a value is a label: up to 64 letters, digits, '.', '_' or '-', so that it may be part of a key."""
    return len(value) <= MAX_LABEL and _WORD.fullmatch(value) is not None


def label(field: str, value: str) -> str:
    """Return a label, which may be empty. Raises BadRequest for anything else."""
    if not is_label(value):
        raise BadRequest.bound(field, repr(value[:MAX_LABEL]), f"at most {MAX_LABEL} letters, digits, '.', '_' or '-'")
    return value


def identifier(field: str, value: str, most: int) -> str:
    """Return an id of 1 to `most` letters, digits, '.', '_' or '-', which may be part of a key. Raises BadRequest."""
    if not 1 <= len(value) <= most or not _WORD.fullmatch(value):
        raise BadRequest.bound(field, repr(value[:most]), f"1 to {most} letters, digits, '.', '_' or '-'")
    return value
