"""Read the pages of the documentation: their text, and the blocks of code in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = tuple(
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")) if not path.is_symlink()
)
"""The pages of the site; docs/architecture.md is a link to ARCHITECTURE.md."""
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "ROADMAP.md", "models/README.md")
PAGES = (*TOP, *SITE)
_BLOCK = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [found[4] for found in _BLOCK.finditer(text_of(page)) if found[3] == language]


def prose(page: str) -> str:
    """Return the text of a page without its fenced blocks."""
    return _BLOCK.sub("", text_of(page))
