"""Test that pages for users stay short and plain: words of a page, length of a sentence, and the words of the field."""

from __future__ import annotations

import re

import pytest
from pages import SITE, prose, text_of

MAX_WORDS = 26_000
"""Of all pages that are written by hand, without the reference."""
MAX_PAGE_WORDS = 900
MAX_SENTENCE_WORDS = 40
GENERATED = {"docs/benchmarks.md", *(page for page in SITE if page.startswith("docs/reference/"))}
REFERENCE = {"docs/metrics.md", "docs/models.md", "docs/protocol.md"}
"""Tables and rules that other tests hold to the code."""
LONG = REFERENCE | {"docs/runbook.md"}
FOR_CONTRIBUTORS = {"docs/decisions.md", "docs/glossary.md"}
HAND = [page for page in SITE if page not in GENERATED]
KUBERNETES = {"docs/kubernetes.md", "docs/upgrades.md"}
"""Pages on which a node is a machine."""
USERS = ["README.md", *(page for page in HAND if page not in REFERENCE | FOR_CONTRIBUTORS)]
BANNED = (
    r"plain streaming|over streaming|speculation windows?|verifier's own nodes|nodes?|rows? of a step|overlay",
    r"seats?|zombies?|fenced|re-?attach(?:es)?|attach(?:es|ed)?|tickets?|grants?|passages?|traffic log",
    r"draft releases?|handovers?|fates?|workload keys?",
    r"nothing that could be told|the like|shall|is told|what fell short|not looked into|next steps",
)
_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )|\||\n(?=!!!)")


def spoken(page: str) -> str:
    """Return a page's text as a reader has it: without code, comments and the addresses of links."""
    text = re.sub(r"<!--.*?-->", "", prose(page), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\w", word)]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*(?:\n[^`\n]*)?`", "CODE", text)


def test_the_readme_is_one_page() -> None:
    assert len(text_of("README.md").splitlines()) <= 150
    assert len(words(spoken("README.md"))) <= 1000


def test_all_pages_together_stay_short() -> None:
    counted = [page for page in (*HAND, "ARCHITECTURE.md") if page not in REFERENCE]
    assert sum(len(words(spoken(page))) for page in counted) <= MAX_WORDS


@pytest.mark.parametrize("page", [page for page in HAND if page not in LONG])
def test_a_page_stays_short(page: str) -> None:
    assert len(words(spoken(page))) <= MAX_PAGE_WORDS


@pytest.mark.parametrize("page", USERS)
def test_a_sentence_stays_short(page: str) -> None:
    sentences = _END.split(without_code(spoken(page)))
    assert [sentence for sentence in sentences if len(words(sentence)) > MAX_SENTENCE_WORDS] == []


@pytest.mark.parametrize("page", USERS)
def test_a_page_for_users_has_the_words_of_the_field(page: str) -> None:
    found = {word.lower() for word in _BANNED.findall(without_code(spoken(page)))}
    assert found - ({"node", "nodes"} if page in KUBERNETES else set()) == set()
