"""Check the settings of every process for `outrider config check`, without starting a server.

Each process reports its settings by its own `--check-config`, so that the report holds what it would use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.cli.output import Document, Result, note, render
from outrider.core.text import table
from outrider.settings import config_file, read_file

EXIT_INVALID = 2
TIMEOUT_S = 60.0
"""Seconds within which a process must report its settings, which includes starting Python on a busy machine."""
PROCESSES: Mapping[str, tuple[str, ...]] = {
    "coordinator": ("coordinator.app",),
    "verifier": ("cloud_verifier.app",),
    "edge": ("edge_agent.cli", "serve"),
    "distill": ("cloud_verifier.distill.cli", "run"),
}
"""Process -> its module, and the subcommand that has all its settings."""
_NOT_INSTALLED = re.compile(r"No module named|pip install")
"""It is found in the last line on stderr of a process whose packages are not installed."""


def check(options: argparse.Namespace) -> int:
    """Print the report and return the exit code. Raises BadRequest for a file that cannot be read."""
    file = config_file(options.file)
    tables = read_file(file) if file is not None else {}  # an unreadable file is reported once, not once per process
    with ThreadPoolExecutor() as pool:
        reports = list(pool.map(partial(_report, file=file), PROCESSES.values()))
    problems: list[str] = []
    processes: list[Document] = []
    for process, report in zip(PROCESSES, reports, strict=True):
        if not isinstance(report, str):
            problems += report.pop("problems")
            processes.append({"process": process, "checked": True, "reason": None, **report})
            continue
        processes.append({"process": process, "checked": False, "reason": report, "missing": [], "settings": {}})
        if not _NOT_INSTALLED.search(report):
            problems.append(f"{process}: could not be checked")
        elif tables.get(process) or any(name.startswith(f"OUTRIDER_{process}_".upper()) for name in os.environ):
            problems.append(f"{process}: has settings that cannot be checked here")
    problems = list(dict.fromkeys(problems))
    rows = [
        (f"{process['process']}.{name}", _shown(value))
        for process in processes
        for name, value in (dict.fromkeys(process["missing"], "must be given") | process["settings"]).items()
    ]
    document = {"file": str(file) if file is not None else None, "problems": problems, "processes": processes}
    print(render(Result(document, table(("SETTING", "VALUE"), rows)), options.output), flush=True)
    for line in (*problems, *(f"{p['process']} is unchecked: {p['reason']}" for p in processes if not p["checked"])):
        note(line)
    return EXIT_INVALID if problems else 0


def _report(command: tuple[str, ...], file: Path | None) -> Document | str:
    """Return a process's report as a document, or as text the reason why there is none."""
    config = ["--config", str(file)] if file is not None else []
    words = [sys.executable, "-m", *command, *config, "--check-config"]
    try:
        ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
        report: Document = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return f"it did not answer within {TIMEOUT_S:.0f} s"
    except ValueError:
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it exited with status {ran.returncode} and no message"
    return report


def _shown(value: Any) -> str:
    """Return a value in one line; `-` if it is not set."""
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
