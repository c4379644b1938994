"""Compare output with the shape that a page shows: the same columns, names and sentences, with other values."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

_VALUES = (
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "HEX"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z"), "TIME"),
    (re.compile(r"outrider-[\w-]{40,}"), "KEY"),
    (re.compile(r"/[\w./-]+"), "PATH"),
    (re.compile(r"\d+ (serving|cordoned|draining)(, \d+ (cordoned|draining))*"), "STATES"),
    (re.compile(r"[\d,.:]*\d%?"), "N"),
)
_CELLS = re.compile(r" {2,}")
_COLUMN = re.compile(r"[A-Z0-9/_ -]*[A-Z][A-Z0-9/_ -]*")


def misfits(shown: str, got: str) -> list[str]:
    """Return the parts of `shown` that `got` does not have; empty if they fit."""
    wanted, found = _document(shown), _document(got)
    if wanted is not None:
        return _missing(wanted, found)
    marks = set(_marks(got))
    return [mark for mark in _marks(shown) if mark not in marks]


def _document(text: str) -> Any:
    """Return the JSON or YAML document, None for anything else."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError:
            return None
    if re.match(r"[a-z_]+:\n", text):
        return yaml.safe_load(text)
    return None


def _missing(wanted: Any, found: Any, at: str = "") -> list[str]:
    """Return names of `wanted` that `found` does not have; the first item of a list stands for all."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        inner = [name for name in wanted if name in found and not name.isdigit()]
        absent = [f"{at}.{name}" for name in wanted if name not in found and not name.isdigit()]
        return absent + [one for name in inner for one in _missing(wanted[name], found[name], f"{at}.{name}")]
    if isinstance(wanted, list) and isinstance(found, list):
        return _missing(wanted[0], found[0], f"{at}[0]") if wanted and found else []
    both_plain = not isinstance(wanted, dict | list) and not isinstance(found, dict | list)
    return [] if both_plain or wanted is None or found is None else [f"{at}: {wanted!r} and {found!r}"]


def _marks(text: str) -> list[str]:
    """Return the parts that must be equal: heads of tables, names in lines of facts, and other lines without values."""
    marks = []
    in_table = False
    for line in text.splitlines():
        cells = _CELLS.split(line.strip())
        if all(_COLUMN.fullmatch(cell) for cell in cells) and len(cells) > 1:
            in_table = True
            marks.append(" | ".join(cells))
        elif not line.strip():
            in_table = False
        elif in_table:
            continue
        elif len(cells) > 1:
            marks.append(_masked(cells[0]))
        else:
            marks.append(_masked(line.strip()))
    return marks


def _masked(line: str) -> str:
    for pattern, name in _VALUES:
        line = pattern.sub(name, line)
    return line
