"""Test that docs/admin.md names existing commands and codes, and all of them."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from coordinator.cli import action_of, arguments

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "admin.md").read_text()
SHOWN = re.findall(r"^\$ (outrider .*)$", TEXT, re.MULTILINE)
LINES = re.findall(r"^(outrider (?:verifiers|sessions) .*\S)$", TEXT, re.MULTILINE)
PIPED = [part for line in LINES for part in re.split(r"\||&&", line)]
USED = [part.strip() for part in PIPED if part.strip().startswith("outrider ")]


@pytest.mark.parametrize("line", [*SHOWN, *USED])
def test_a_command_of_the_page_is_one_that_there_is(line):
    assert callable(action_of(arguments.parse(shlex.split(line)[1:])))


def test_every_verb_of_every_noun_is_on_the_page():
    nouns = _choices(arguments.parser())
    for noun in ("verifiers", "sessions", "tenants", "window", "releases", "config"):
        verbs = "\\|".join(_choices(nouns[noun]))
        assert f"| `outrider {noun} {verbs}` |" in TEXT
    assert all(f"outrider {alone}" in TEXT for alone in ("status", "top"))


def test_the_exit_codes_of_the_page_are_those_of_the_command():
    documented = dict(re.findall(r"^\| (\d) \| (.*) \|$", TEXT, re.MULTILINE))
    helped = dict(re.findall(r"^  (\d)  (.*)$", arguments.EPILOG, re.MULTILINE))
    assert documented.keys() == helped.keys()
    assert all(helped[code].startswith(said) for code, said in documented.items())


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [choices] = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return choices
