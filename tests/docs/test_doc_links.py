"""Test that the references of pages exist: other pages, their sections, files of the repository, modules, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, SITE, prose, text_of

ALL = (*PAGES, "ARCHITECTURE.md", "CHANGELOG.md")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
MADE = {"docker/.env"}
"""Files that a reader makes."""
CODE = ("outrider", "edge_agent", "cloud_verifier", "coordinator", "benchmarks", "tools", "proto", "docker")
NAMING = {".py", ".proto", ".lua", ".yaml", ".yml"}
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


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    listed = re.findall(r": (\S+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == sorted([*SITE, "docs/architecture.md"])


def test_every_alarm_has_a_section_of_the_runbook_with_its_severity_and_leads_there() -> None:
    rules = text_of("docker/prometheus/alerts.yml")
    alarms = re.findall(r"- alert: (\w+)", rules)
    sections = re.findall(r"^## (Outrider\w+)\n\n\*(\w+), ", text_of("docs/runbook.md"), re.MULTILINE)
    assert sections == list(zip(alarms, re.findall(r"severity: (\w+)", rules), strict=True))
    assert re.findall(r"runbook_url: (.+)", rules) == [f"docs/runbook.md#{alarm.lower()}" for alarm in alarms]


def test_every_page_that_the_code_names_is_there() -> None:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in NAMING]
    named = {page for path in files for page in re.findall(r"docs/[\w./-]+\.md", path.read_text(encoding="utf-8"))}
    assert named
    assert {page for page in named if not (ROOT / page).exists()} == set()
