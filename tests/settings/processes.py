"""Run the four processes with settings, and the operator's command, as their users start them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from cloud_verifier import app as verifier_app
from cloud_verifier.config import VerifierConfig
from cloud_verifier.distill import cli as distill_cli
from cloud_verifier.distill.config import DistillConfig
from coordinator import app as coordinator_app
from coordinator.config import CoordinatorConfig
from edge_agent import cli as edge_cli
from edge_agent.config import EdgeSettings


@dataclass(frozen=True)
class Process:
    """Describe a process that has settings."""

    name: str
    model: type[BaseSettings]
    command: tuple[str, ...]
    """Its module, and the subcommand that has all its settings."""
    parser: Callable[[], Any]
    needs: Mapping[str, str]
    """Settings that must be given."""
    numbers: tuple[str, str, str]
    """Three of its settings that take 1 to 9, as numbers or as text."""


NEEDED = dict.fromkeys(("traffic", "target", "draft", "artifacts"), "x")
PROCESSES = (
    Process(
        "coordinator",
        CoordinatorConfig,
        ("coordinator.app",),
        coordinator_app.parser,
        {},
        ("artifacts_url", "release_keys", "redis"),
    ),
    Process(
        "verifier",
        VerifierConfig,
        ("cloud_verifier.app",),
        verifier_app.parser,
        {"model": "m"},
        ("name", "threads", "max_sessions"),
    ),
    Process(
        "edge",
        EdgeSettings,
        ("edge_agent.cli", "serve"),
        edge_cli.parser,
        {},
        ("draft_workers", "target", "draft"),
    ),
    Process(
        "distill",
        DistillConfig,
        ("cloud_verifier.distill.cli", "run"),
        distill_cli.parser,
        NEEDED,
        ("metrics", "traffic", "fresh_tokens"),
    ),
)


def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program's `main` in this process, in an environment without other settings."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            code = import_module(module).main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess([module, *arguments], code or 0, out.getvalue(), err.getvalue())


def toml(path: Path, **tables: Mapping[str, Any]) -> Path:
    """Return a file with these tables; strings and JSON's numbers and lists are the same in TOML."""
    lines = [
        line
        for name, values in tables.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    ]
    path.write_text("\n".join(lines))
    return path
