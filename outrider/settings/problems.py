"""Describe what is wrong with settings: the place, the value and what is near to it, but never a secret."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from outrider.core.errors import BadRequest

MAX_SHOWN = 80
"""Characters of a value that are repeated."""
_PASSWORD = re.compile(r"(://[^/@\s]*:)[^@/\s]*@")


@dataclass(frozen=True)
class SettingProblem:
    """Describes what is wrong with one setting, or with several that contradict one another."""

    where: str
    what: str
    name: str = ""
    """The setting, if it is one."""
    missing: bool = False
    """The setting is required, and no source has it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class WrongSettings(BadRequest):
    """All that is wrong with the settings of a process."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        lines = [str(problem) for problem in problems]
        several = "\n  ".join([f"{len(lines)} settings are wrong:", *lines])
        super().__init__(lines[0] if len(lines) == 1 else several, field=problems[0].name)
        self.problems = tuple(problems)


def near(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return the end of a message about an unknown name: "; the nearest is NAME", or "" if none is like it."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; the nearest is {shown(found[0])}" if found else ""


def is_secret(field: FieldInfo) -> bool:
    """Return whether any part of a setting's value is a secret."""
    return _holds_secret(field.annotation)


def without_passwords(text: str) -> str:
    """Replace the passwords of URLs in a text."""
    return _PASSWORD.sub(r"\1********@", text)


def got(value: Any) -> str:
    """Return a value as it was given, shortened and without passwords."""
    said = repr(value)
    return without_passwords(said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}...")


def printable(name: str) -> str:
    """Return a name from outside, escaped if it could steer a terminal."""
    return name if name.isascii() and name.isprintable() and len(name) <= MAX_SHOWN else got(name)


def _holds_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))
