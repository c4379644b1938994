"""Test that the references of pages exist: other pages, their sections, files of the repository, modules, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, prose, text_of

ALL = (*PAGES, "ARCHITECTURE.md", "CHANGELOG.md")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
MADE = {"docker/.env"}
"""Files that a reader makes."""
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def anchors(path: Path) -> set[str]:
    """Return the anchors of the sections of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(path.relative_to(ROOT).as_posix()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", ALL)
def test_a_link_leads_somewhere(page: str) -> None:
    dead = []
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", ALL)
def test_a_file_that_is_named_is_there(page: str) -> None:
    named = {code for code in _CODE.findall(prose(page)) if re.fullmatch(r"[\w./-]+", code)}
    paths = {code.rstrip("/") for code in named if code.split("/")[0] in FOLDERS and "/" in code} - MADE
    assert {path for path in paths if not (ROOT / path).exists() and not _named_elsewhere(path)} == set()


def _named_elsewhere(path: str) -> bool:
    """Return whether a top-level folder has this path; ARCHITECTURE.md omits the folder it describes."""
    return any(ROOT.glob(f"*/{path}"))


def test_every_page_of_the_docs_can_be_found_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall(text_of("README.md"))}
    assert {page for page in PAGES if page.startswith("docs/")} - linked == set()
