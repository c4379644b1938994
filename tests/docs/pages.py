"""Read the pages: blocks of code, and the commands in them with the output that is shown."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "models" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
)
SHELL = ("sh", "console")
COMMANDS = (*SHELL, "python")
DATA = ("text", "json", "toml", "yaml", "ini", "protobuf", "promql")
"""Languages of blocks in which nothing is to be run."""
PROMPT = "$ "
_INDENT = "    "
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[^`\n]*)$")


@dataclass(frozen=True)
class Block:
    """Hold a block of code. `line` is that of its first line of text, counted from 1."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Step:
    """Hold one command. `shown`: the output below it, None if the page shows none."""

    block: Block
    command: str
    shown: str | None = None


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Yield fenced and indented blocks in their order. Raises ValueError for a fence that is never closed."""
    lines = text_of(page).splitlines()
    at = 0
    while at < len(lines):
        begin = at
        if fence := _FENCE.match(lines[at]):
            at = _end_of_fence(page, lines, at, fence["marks"])
            held = [line.removeprefix(fence["indent"]) for line in lines[begin + 1 : at]]
            yield Block(page, begin + 2, fence["language"].strip() or _language(held), "\n".join(held))
        elif lines[at].startswith(_INDENT) and (at == 0 or not lines[at - 1].strip()):
            while at + 1 < len(lines) and (lines[at + 1].startswith(_INDENT) or not lines[at + 1].strip()):
                at += 1
            held = [line.removeprefix(_INDENT) for line in lines[begin : at + 1]]
            yield Block(page, begin + 1, _language(held), "\n".join(held).rstrip("\n"))
        at += 1


def _end_of_fence(page: str, lines: list[str], begin: int, marks: str) -> int:
    for at in range(begin + 1, len(lines)):
        if lines[at].strip() == marks:
            return at
    raise ValueError(f"{page}:{begin + 1}: this fence is never closed")


def _language(lines: list[str]) -> str:
    """Return the language of a block without one: unmarked text is meant to be typed."""
    return "console" if lines and lines[0].startswith(PROMPT) else "sh"


def steps(block: Block) -> list[Step]:
    """Return the commands of a block. Raises ValueError for a transcript that does not begin with a prompt."""
    if block.language == "python":
        return [Step(block, block.text)]
    if block.language == "sh":
        return [Step(block, command) for command in _complete(block.text.splitlines())]
    return list(_transcript(block))


def _transcript(block: Block) -> Iterator[Step]:
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    if parts[0].strip() or len(parts) == 1:
        raise ValueError(f"{block.place}: a console block begins with `$ ` and a command")
    for part in parts[1:]:
        lines = part.splitlines()
        command = next(_complete(lines))
        shown = "\n".join(lines[command.count("\n") + 1 :]).strip("\n")
        yield Step(block, command, shown or None)


def _complete(lines: list[str]) -> Iterator[str]:
    """Join lines until bash takes them for whole commands; leave out comments and empty lines."""
    held: list[str] = []
    for line in lines:
        held.append(line)
        command = "\n".join(held)
        if not held[-1].endswith("\\") and _is_whole(command):
            if command.strip() and not command.lstrip().startswith("#"):
                yield command
            held = []
    if held:
        yield "\n".join(held)  # bash will say what is wrong with it


def _is_whole(command: str) -> bool:
    if not re.search(r"['\"`({<]|\b(do|then|case)\b", command):
        return True
    parsed = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    return parsed.returncode == 0 and not parsed.stderr
