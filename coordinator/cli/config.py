"""`outrider config`: what each process would make of a configuration file, without starting anything.

Every process is asked itself, by its own `--check-config`, so that what is told is what it would do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.cli.output import Shown, form_option, note, render
from outrider.core.text import table
from outrider.settings.file import VARIABLE, config_file, read
from outrider.settings.layers import variables
from outrider.settings.report import shown

EXIT_WRONG = 2
TIMEOUT_S = 60.0
"""For one process to say what it makes of its settings: Python's start, on a busy machine."""
PROCESSES: Mapping[str, tuple[str, ...]] = {
    "coordinator": ("coordinator.app",),
    "verifier": ("cloud_verifier.app",),
    "edge": ("edge_agent.cli", "serve"),
    "distill": ("cloud_verifier.distill.cli", "run"),
}
"""The module of each, and a command of it that has all its settings."""

_ABSENT = re.compile(r"No module named|pip install")
"""In the last line of a process that lacks its packages."""
Document = dict[str, Any]


@dataclass(frozen=True)
class Silent:
    """What is known of a process that did not say what it makes of its settings."""

    why: str
    absent: bool = False
    """It is not installed here."""


def add_parser(commands: Any) -> None:
    config = commands.add_parser("config", help="check the settings of every process, before one starts with them")
    verbs = config.add_subparsers(required=True, metavar="VERB", dest="verb")
    check = verbs.add_parser(
        "check",
        help="show every setting and where it comes from, and all that is wrong",
        epilog="Settings come from flags, from the environment, from FILE and from defaults, in that order; this"
        " command cannot see the flags of others. `outrider-verifier ... --check-config` shows one process with its"
        " flags. Exit codes: 0 nothing is wrong, 2 something is, or could not be checked; all of it is said on stderr.",
    )
    check.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help=f"TOML, a table for each process [default: the environment's settings alone] [env: {VARIABLE}]",
    )
    form_option(check)
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    """The exit code. Raises BadRequest for a file that cannot be read."""
    file = config_file(options.file)
    if file is not None:
        read(file)  # what is wrong with all of it is said once
    document = summary(file, asyncio.run(_ask_all(file)))
    print(render(Shown(document, _table(document)), options.output), flush=True)
    for line in (*document["problems"], *(f"warning: {warning}" for warning in document["warnings"])):
        note(line)
    for process in document["processes"]:
        if not process["checked"]:
            note(f"{process['process']} is unchecked: {process['reason']}")
        if process["missing"] and any(setting["source"] != "default" for setting in process["settings"]):
            note(f"{process['process']} needs {', '.join(process['missing'])} besides, from its command line")
    return EXIT_WRONG if document["problems"] else 0


def summary(file: Path | None, reports: Mapping[str, Document | Silent]) -> Document:
    """Of all processes. reports: what each said, or why it said nothing."""
    problems: dict[str, None] = {}
    warnings: dict[str, None] = {}
    processes = []
    for process, told in reports.items():
        if isinstance(told, Silent):
            unchecked = {"process": process, "checked": False, "reason": told.why, "missing": [], "settings": []}
            processes.append(unchecked)
            problems |= dict.fromkeys(_unchecked(process, told, file))
            continue
        missing = [problem["where"] for problem in told["problems"] if problem["missing"]]
        problems |= {f"{p['where']}: {p['what']}": None for p in told["problems"] if not p["missing"]}
        warnings |= dict.fromkeys(told["warnings"])
        checked = {"process": process, "checked": True, "reason": None, "missing": missing}
        processes.append({**checked, "settings": told["settings"]})
    return {
        "file": str(file) if file is not None else None,
        "problems": list(problems),
        "warnings": list(warnings),
        "processes": processes,
    }


def _unchecked(process: str, silent: Silent, file: Path | None) -> list[str]:
    """What is wrong with leaving a process unchecked: nothing where it is not installed and nobody configures it."""
    if not silent.absent:
        return [f"{process}: could not be checked"]
    table = read(file).get(process) if file is not None else None
    given = [*variables(f"OUTRIDER_{process.upper()}_").values(), *([f"{file}: [{process}]"] if table else [])]
    return [f"{process}: has settings that cannot be checked here: {', '.join(given)}"] if given else []


async def _ask_all(file: Path | None) -> dict[str, Document | Silent]:
    answers = await asyncio.gather(*(_ask(command, file) for command in PROCESSES.values()))
    return dict(zip(PROCESSES, answers, strict=True))


async def _ask(command: tuple[str, ...], file: Path | None) -> Document | Silent:
    """A process's report, or why there is none."""
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
        return Silent(f"it said nothing for {TIMEOUT_S:.0f} s")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        told: Document = json.loads(out)
    except ValueError:
        lines = err.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"it ended with {child.returncode} and said nothing"
        return Silent(why, absent=_ABSENT.search(why) is not None)
    return told


def _table(document: Document) -> str:
    rows = [
        (f"{process['process']}.{setting['name']}", shown(setting["value"]), _source(process, setting))
        for process in document["processes"]
        for setting in process["settings"]
    ]
    return table(("SETTING", "VALUE", "SOURCE"), rows)


def _source(process: Document, setting: Document) -> str:
    return "missing" if setting["name"] in process["missing"] else str(setting["source"])
