"""Say what came of an attack."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.attack.lab import Lab
from benchmarks.support import harness


@dataclass(frozen=True)
class Finding:
    """Hold what was measured of an attack, and whether the product held."""

    held: bool
    measured: dict[str, Any]
    bound: str
    """What had to be measured, in words."""


Attack = Callable[[Lab], Awaitable[Finding]]


def rounded(value: float | None) -> float | None:
    """Return a figure as it is printed."""
    return harness.rounded(value, 2)
