"""Types of what callers give: one place, before anything is asked of anybody. Each check raises BadRequest."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import NoReturn

from outrider.core.errors import BadRequest

_MAX_SHOWN = 80
_MAX_BITS = 64
_LABEL = re.compile(r"[A-Za-z0-9._-]{0,64}")


def whole(field: str, value: object) -> int:
    """Anything that is an integer, NumPy's too; no bool."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        refuse(field, value, "a whole number")
    if isinstance(value, bool) or number.bit_length() > _MAX_BITS:
        refuse(field, value, f"a whole number of at most {_MAX_BITS} bits")
    return number


def real(field: str, value: object) -> float:
    """Anything that is a real number, NumPy's too; no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(field, value, "a number")
    try:
        return float(value)
    except OverflowError:
        refuse(field, value, "a number that a float can hold")


def truth(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(field, value, "True or False")
    return value


def text(field: str, value: object) -> str:
    """A str that UTF-8 can express."""
    if not isinstance(value, str):
        refuse(field, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(field, value, "a text without lone surrogates")
    return value


def label(field: str, value: object) -> str:
    """A short name that may become part of a key; may be empty."""
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        refuse(field, value, "at most 64 letters, digits, '.', '_' or '-'")
    return value


def items(field: str, value: object, what: str) -> tuple[object, ...]:
    """The items of a list, a tuple or an array. what: they are, for the message."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set) or not isinstance(value, Iterable):
        refuse(field, value, f"a list of {what}")
    return tuple(value)


def token_ids(field: str, value: object) -> tuple[int, ...]:
    name = f"a token id in {field}"
    return tuple(whole(name, item) for item in items(field, value, "token ids"))


def refuse(field: str, value: object, bound: str) -> NoReturn:
    """Raise BadRequest with as much of the value as a message can take."""
    try:
        shown = repr(value)
    except Exception:  # somebody else's, or an integer of thousands of digits
        shown = f"a {type(value).__name__}"
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    raise BadRequest.bound(field, shown, bound)
