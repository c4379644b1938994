"""What is wrong with settings, each said with its place, what was got and what is near to it; secrets are not said."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from outrider.core.errors import BadRequest

SHOWN = 80
"""Letters of a value that are repeated."""
_PASSWORD = re.compile(r"(://[^/@\s]*:)[^@/\s]*@")


@dataclass(frozen=True)
class Problem:
    """Of one setting, or of several that contradict one another."""

    where: str
    what: str
    name: str = ""
    """The setting, where it is one."""
    missing: bool = False
    """It must be given, and nobody did."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class WrongSettings(BadRequest):
    """All that is wrong, at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        lines = [str(problem) for problem in problems]
        several = "\n  ".join([f"{len(lines)} settings are wrong:", *lines])
        super().__init__(lines[0] if len(lines) == 1 else several, field=problems[0].name)
        self.problems = tuple(problems)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like it; "" where none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def near(name: str, known: Iterable[str]) -> str:
    """The end of a complaint about a name that is not known."""
    found = nearest(name.lower(), known)
    return f"; the nearest is {found}" if found else ""


def is_secret(field: FieldInfo) -> bool:
    """Whether any part of its value is."""
    return _holds_secret(field.annotation)


def veiled(text: str) -> str:
    """Without the password of a URL."""
    return _PASSWORD.sub(r"\1********@", text)


def got(value: Any) -> str:
    """As it was given, shortened."""
    said = repr(value)
    return veiled(said if len(said) <= SHOWN else f"{said[:SHOWN]}...")


def plain(name: str) -> str:
    """A name from a file, fit for a terminal."""
    return name if name.isascii() and name.isprintable() and len(name) <= SHOWN else got(name)


def _holds_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))
