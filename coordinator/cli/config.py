"""Check the settings of every process for `outrider config check`, without starting a server.

Each process reports its settings by its own `--check-config`, so that the report holds what it would use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from coordinator.cli.output import Document, Result, note, render
from outrider.core.text import table
from outrider.settings.layers import config_file, read_file, variables
from outrider.settings.report import shown

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
    if file is not None:
        read_file(file)  # reports an unreadable file once, rather than once per process
    document = asyncio.run(_document(file))
    print(render(Result(document, table(("SETTING", "VALUE", "SOURCE"), _rows(document))), options.output), flush=True)
    for line in (*document["problems"], *(f"warning: {warning}" for warning in document["warnings"])):
        note(line)
    for process in document["processes"]:
        if not process["checked"]:
            note(f"{process['process']} is unchecked: {process['reason']}")
        if process["missing"] and any(setting["source"] != "default" for setting in process["settings"]):
            note(f"{process['process']} needs {', '.join(process['missing'])} in addition, on its command line")
    return EXIT_INVALID if document["problems"] else 0


async def _document(file: Path | None) -> Document:
    """Return the reports of all processes as one document."""
    problems: list[str] = []
    warnings: list[str] = []
    processes: list[Document] = []
    reports = await asyncio.gather(*(_report(command, file) for command in PROCESSES.values()))
    for process, report in zip(PROCESSES, reports, strict=True):
        reason, missing, settings = None, [], []
        if isinstance(report, str):
            reason = report
            problems += _problems_unchecked(process, reason, file)
        else:
            problems += [f"{p['where']}: {p['what']}" for p in report["problems"] if not p["missing"]]
            warnings += report["warnings"]
            missing, settings = [p["where"] for p in report["problems"] if p["missing"]], report["settings"]
        checked = {"checked": reason is None, "reason": reason, "missing": missing, "settings": settings}
        processes.append({"process": process, **checked})
    unique = {"problems": list(dict.fromkeys(problems)), "warnings": list(dict.fromkeys(warnings))}
    return {"file": str(file) if file is not None else None, **unique, "processes": processes}


def _problems_unchecked(process: str, reason: str, file: Path | None) -> list[str]:
    """Return the problems of a process that cannot be checked: none if it is not installed and has no settings."""
    if not _NOT_INSTALLED.search(reason):
        return [f"{process}: could not be checked"]
    settings = read_file(file).get(process) if file is not None else None
    given = [*variables(f"OUTRIDER_{process.upper()}_").values(), *([f"{file}: [{process}]"] if settings else [])]
    return [f"{process}: has settings that cannot be checked here: {', '.join(given)}"] if given else []


async def _report(command: tuple[str, ...], file: Path | None) -> Document | str:
    """Return a process's report as a document, or as text the reason why there is none."""
    config = ["--config", str(file)] if file is not None else []
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, *config, "--check-config", "json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await child.communicate()
    except TimeoutError:
        return f"it did not answer within {TIMEOUT_S:.0f} s"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        report: Document = json.loads(out)
    except ValueError:
        lines = err.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it exited with status {child.returncode} and no message"
    return report


def _rows(document: Document) -> list[tuple[str, str, str]]:
    """Return name, value and source of each setting."""
    return [
        (
            f"{process['process']}.{s['name']}",
            shown(s["value"]),
            "missing" if s["name"] in process["missing"] else s["source"],
        )
        for process in document["processes"]
        for s in process["settings"]
    ]
