"""Test that help is shown at once: a program that only explains itself imports nothing that takes long."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SETTINGS = {"pydantic", "pydantic_settings"}
HEAVY = {
    *SETTINGS,
    *(
        "cryptography",
        "fastapi",
        "google.protobuf",
        "grpc",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "llama_cpp",
        "numpy",
    ),
    *("prometheus_client", "pyarrow", "redis", "rich", "starlette", "tokenizers", "torch", "transformers", "uvicorn"),
    "yaml",
}
"""Modules that take 20 ms or more to import."""
_PROGRAM = """
import json, sys
from {module} import {function}
for command in json.loads(sys.argv[1]):
    sys.argv = ["program", *command, "--help"]
    try:
        {function}()
    except SystemExit as ended:
        assert ended.code == 0, command
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


COMMANDS: dict[str, list[Sequence[str]]] = {
    "outrider": [
        (),
        ("up",),
        ("demo",),
        ("estimate",),
        ("status",),
        ("top",),
        ("verifiers", "list"),
        ("tenants", "create"),
    ],
    "outrider-coordinator": [()],
    "outrider-distill": [(), ("run",), ("key",), ("publish",), ("forget",)],
    "outrider-edge": [(), ("generate",), ("chat",), ("serve",), ("bench",)],
    "outrider-verifier": [()],
}


def imported(name: str, asked: Sequence[Sequence[str]]) -> list[set[str]]:
    """Return the heavy modules that a program has imported after the help of each of its commands."""
    module, _, function = SCRIPTS[name].partition(":")
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(module=module, function=function), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ran.stdout.count("usage: ") == len(asked)
    return [HEAVY & set(json.loads(line)) for line in ran.stderr.splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_program_imports_nothing_heavy_but_the_library_of_its_settings(name: str) -> None:
    allowed = {*(SETTINGS if name != "outrider" else ())}
    if name in ("outrider-coordinator", "outrider-verifier"):
        allowed.add("google.protobuf")  # a session's limits, which they configure, are bounds of its messages
    found = dict(zip(COMMANDS[name], imported(name, COMMANDS[name]), strict=True))
    assert {command: modules for command, modules in found.items() if modules - allowed} == {}
