"""Skip a test whose requirement is missing, or fail it where everything is required (in CI)."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip, or fail if OUTRIDER_REQUIRE_SERVICES is 1."""
    if os.environ.get("OUTRIDER_REQUIRE_SERVICES") == "1":
        pytest.fail(what)
    pytest.skip(what)


def demand(module: str, use: str) -> None:
    """Skip or fail as `missing` does, if a module is not installed that `use` needs."""
    if importlib.util.find_spec(module) is None:
        missing(f"{module} is not installed, and {use} needs it: pip install -e '.[dev]'")
