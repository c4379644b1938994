"""Test that tools.structure counts a small known product correctly, and exits with status 1 beyond its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import structure
from tools.structure import LIMITS, LISTS, is_fragment, measure

KEYS = [
    "lines",
    "files",
    "classes",
    "most_files_in_folder",
    "duplicate_class_names",
    "most_attributes",
    "docstring_fragments",
]

ONE = '''\
"""Keep things in one place."""


class Store:
    """Of a session."""

    def __init__(self) -> None:
        self.a, self.b = 1, 2
        self.a += 1
        self.c: int = 3
        other = self
        other.d = 4

    def size(self) -> int:
        """Tokens held."""
        return 3


class _Private:
    """This one is not public."""
'''
TWO = '''\
"""Who knows."""


class Store:
    """A store that is somewhere else."""


class _Private:
    pass


class Settings(BaseSettings):
    def __init__(self) -> None:
        self.many, self.more, self.most, self.yet_more = 1, 2, 3, 4
'''


@pytest.fixture
def product(tmp_path: Path) -> Path:
    for path, text in (
        ("alpha/__init__.py", ""),
        ("alpha/one.py", ONE),
        ("alpha/one_pb2.py", "class Generated: ..."),
        ("beta/deep/two.py", TWO),
        ("elsewhere/three.py", ONE),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_every_count_is_of_the_packages_without_stubs(product: Path) -> None:
    found = measure(product, ("alpha", "beta"))
    assert list(found.counts()) == KEYS
    assert found.counts() == {
        "lines": ONE.count("\n") + TWO.count("\n"),
        "files": 3,
        "classes": 5,
        "most_files_in_folder": 2,
        "duplicate_class_names": 1,
        "most_attributes": 3,
        "docstring_fragments": 2,
    }
    assert found.duplicates == {"Store": ["alpha/one.py:4", "beta/deep/two.py:4"]}
    assert found.attributes == [(3, "alpha/one.py:4: Store")]
    assert found.fragments == ["alpha/one.py:4: Of a session.", "alpha/one.py:14: Tokens held."]


@pytest.mark.parametrize(
    "fragment",
    ["Of all ranks.", "For operators.", "From now on.", "This one's business.", "Where a file is not.", "Bytes.", ""],
)
def test_what_has_no_verb_is_a_fragment(fragment: str) -> None:
    assert is_fragment(fragment) is (fragment != "Where a file is not.")


@pytest.mark.parametrize(
    "fragment",
    [
        "The drafts of a target.",
        "Limits of a session.",
        "Step costs by rows.",
        "Report of a verifier.",
        "All moves of a session.",
        "Names by address.",
        "Counts and limits of a step.",
        "The draft's releases.",
        "A tokenizer's reports.",
    ],
)
def test_a_noun_that_looks_like_a_verb_is_none(fragment: str) -> None:
    assert is_fragment(fragment)


@pytest.mark.parametrize(
    "sentence",
    [
        "Draft the next level.",
        "Report what verifiers measured.",
        "Limit the rows of a step.",
        "Names every Redis key.",
        "It drafts ahead.",
        "The loop that drafts for a session.",
        "A verifier limits the rows of a step.",
        "Costs are in seconds.",
        "Cordon, uncordon or drain a verifier.",
        "Implement the operator's command.",
        "Define the errors.",
        "Adopt the registration.",
        "Return the slots to the pool.",
        "The slots of a session are free.",
        "It keeps nothing.",
        "Raises BadRequest.",
        "Carries the prompt.",
        "Of all that stands here at length, without any verb that could be found in it",
    ],
)
def test_a_sentence_or_a_long_docstring_is_none(sentence: str) -> None:
    assert not is_fragment(sentence)


def test_the_product_itself_is_measured_and_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main([]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    counts = json.loads(last)
    assert list(counts) == KEYS and counts["files"] > 200 and counts["lines"] > 20_000
    assert [line.split()[0] for line in table] == KEYS


@pytest.mark.parametrize("name", LISTS)
def test_what_is_behind_a_count_can_be_listed(
    product: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = measure(product, ("alpha", "beta"))
    monkeypatch.setattr(structure, "measure", lambda: small)
    assert structure.main(["--list", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: -len(KEYS) - 1] == list(small.listed(name)) != []
    assert json.loads(lines[-1]) == small.counts()


def test_a_count_beyond_its_limit_fails_the_check_and_is_named(
    product: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = measure(product, ("alpha", "beta"))
    monkeypatch.setattr(structure, "measure", lambda: small)
    for name in LIMITS:
        monkeypatch.setitem(LIMITS, name, 10**9)
    assert structure.main(["--check"]) == 0
    monkeypatch.setitem(LIMITS, "classes", 1)
    assert structure.main(["--check"]) == 1 and structure.main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == "beyond the limit: classes; --list shows the places\n"
    assert json.loads(printed.out.splitlines()[-1])["classes"] > 1


def test_the_limits_are_those_that_were_agreed() -> None:
    assert LIMITS == {
        "lines": 55_300,
        "classes": 540,
        "most_files_in_folder": 20,
        "duplicate_class_names": 5,
        "most_attributes": 20,
        "docstring_fragments": 20,
    }


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m tools.structure --list files | head -1"
    ended = subprocess.run(command, shell=True, cwd=structure.ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "outrider/__init__.py\n" and ended.stderr == ""
