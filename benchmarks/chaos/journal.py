"""Collect what the processes of a cluster log, and pick out what must not stand there."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_VARIES = re.compile(r"[0-9a-f]{8,}|\d+(\.\d+)?")
_RAW = ("Traceback", "Error", "Assertion", "Fatal", "core dumped")
_GRPC = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d")
"""How lines of gRPC's own core begin: their level and the time."""


@dataclass
class Journal:
    """Counts lines at ERROR and WARNING by their text, in which ids and numbers count as equal.

    folder: where every line is kept, in a file for each process; None keeps none. on_line: receives each process's name
    and line.
    """

    folder: Path | None = None
    on_line: Callable[[str, str], None] = lambda name, line: None
    errors: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    grpc: Counter[str] = field(default_factory=Counter)
    """Lines of gRPC's own core, which says what arrived broken; they are no defect of ours."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first line of each kind, as it was written."""

    def add(self, name: str, line: str) -> None:
        """Take a line that a process has written to stderr."""
        self.on_line(name, line)
        if self.folder is not None:
            with Path(self.folder, f"{name}.log").open("a") as file:
                file.write(line + "\n")
        try:
            entry = json.loads(line)
            level, message = entry["level"], f"{entry['logger']}: {entry['message']}"
        except (ValueError, KeyError, TypeError):
            level, message = _level_of(line), line
            if _GRPC.match(line):
                self._count(self.grpc, name, message, line)
        if level in ("ERROR", "CRITICAL"):
            self._count(self.errors, name, message, line)
        elif level == "WARNING":
            self._count(self.warnings, name, message, line)

    def excuse(self, text: str, times: int) -> None:
        """Leave out the kinds of errors with this text, if they came at most so often."""
        for kind in [kind for kind in self.errors if text in kind]:
            if self.errors[kind] <= times:
                del self.errors[kind]

    def read(self, name: str, file: Path) -> None:
        """Take all lines of a file that a process has logged to itself."""
        for line in file.read_text(errors="replace").splitlines():
            self.add(name, line)

    def _count(self, counter: Counter[str], name: str, message: str, line: str) -> None:
        kind = f"{name.rstrip('0123456789-')}: {_VARIES.sub('#', message)[:200]}"
        counter[kind] += 1
        self.examples.setdefault(kind, line)


def _level_of(line: str) -> str:
    """Return the level of a line that is none of the product's; "" for one that says nothing."""
    return "ERROR" if any(word in line for word in _RAW) and not _GRPC.match(line) else ""
