"""`outrider config check`: show what each process would make of its settings, without starting anything.

Each process is asked by its own `--check-config`, so the answer is what it would do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from coordinator.cli.json_views import Document
from coordinator.cli.output import Column, Result, note, render, table
from outrider.settings.layers import config_file, read_file, variables
from outrider.settings.report import shown

EXIT_WRONG = 2
TIMEOUT_S = 60.0
"""Seconds for one process to report its settings, which includes Python's start on a busy machine."""
PROCESSES: Mapping[str, tuple[str, ...]] = {
    "coordinator": ("coordinator.app",),
    "verifier": ("cloud_verifier.app",),
    "edge": ("edge_agent.cli", "serve"),
    "distill": ("cloud_verifier.distill.cli", "run"),
}
"""The module of each process, and a command of it that has all its settings."""
COLUMNS = (
    Column("SETTING", lambda row: row[0]),
    Column("VALUE", lambda row: row[1]),
    Column("SOURCE", lambda row: row[2]),
)
_ABSENT = re.compile(r"No module named|pip install")
"""In the last line of a process that lacks its packages."""


def check(options: argparse.Namespace) -> int:
    """Print the report and return the exit code. Raises BadRequest for a file that cannot be read."""
    file = config_file(options.file)
    if file is not None:
        read_file(file)  # a file that no process could read is complained of once
    document = asyncio.run(_document(file))
    print(render(Result(document, lambda: table(COLUMNS, _rows(document))), options.output), flush=True)
    for line in (*document["problems"], *(f"warning: {warning}" for warning in document["warnings"])):
        note(line)
    for process in document["processes"]:
        if not process["checked"]:
            note(f"{process['process']} is unchecked: {process['reason']}")
        if process["missing"] and any(setting["source"] != "default" for setting in process["settings"]):
            note(f"{process['process']} needs {', '.join(process['missing'])} besides, from its command line")
    return EXIT_WRONG if document["problems"] else 0


async def _document(file: Path | None) -> Document:
    """Return the reports of all processes as one."""
    problems: list[str] = []
    warnings: list[str] = []
    processes: list[Document] = []
    answers = await asyncio.gather(*(_ask(command, file) for command in PROCESSES.values()))
    for process, answer in zip(PROCESSES, answers, strict=True):
        reason, missing, settings = None, [], []
        if isinstance(answer, str):
            reason = answer
            problems += _unchecked(process, reason, file)
        else:
            problems += [f"{p['where']}: {p['what']}" for p in answer["problems"] if not p["missing"]]
            warnings += answer["warnings"]
            missing, settings = [p["where"] for p in answer["problems"] if p["missing"]], answer["settings"]
        found = {"checked": reason is None, "reason": reason, "missing": missing, "settings": settings}
        processes.append({"process": process, **found})
    said = {"problems": list(dict.fromkeys(problems)), "warnings": list(dict.fromkeys(warnings))}  # each once
    return {"file": str(file) if file is not None else None, **said, "processes": processes}


def _unchecked(process: str, reason: str, file: Path | None) -> list[str]:
    """Return what is wrong with leaving a process unchecked: nothing if it is not installed and has no settings."""
    if not _ABSENT.search(reason):
        return [f"{process}: could not be checked"]
    settings = read_file(file).get(process) if file is not None else None
    given = [*variables(f"OUTRIDER_{process.upper()}_").values(), *([f"{file}: [{process}]"] if settings else [])]
    return [f"{process}: has settings that cannot be checked here: {', '.join(given)}"] if given else []


async def _ask(command: tuple[str, ...], file: Path | None) -> Document | str:
    """Return a process's report, or the reason why there is none."""
    given = ["--config", str(file)] if file is not None else []
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, *given, "--check-config", "json"),
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
        return lines[-1] if lines else f"it ended with {child.returncode} and said nothing"
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
