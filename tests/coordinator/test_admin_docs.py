"""Test that docs/admin.md names all commands and exit codes; tests/docs runs its lines through the parsers."""

import argparse
import re
from pathlib import Path

from coordinator.cli import arguments

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "admin.md").read_text()


def test_every_verb_of_every_noun_is_on_the_page():
    nouns = _choices(arguments.parser())
    for noun in ("verifiers", "sessions", "tenants", "window", "releases", "config"):
        verbs = ", ".join(f"`{verb}`" for verb in _choices(nouns[noun]))
        assert f"| `outrider {noun}` | {verbs} |" in TEXT
    assert all(f"outrider {alone}" in TEXT for alone in ("status", "top"))


def test_the_exit_codes_of_the_page_are_those_of_the_command():
    documented = dict(re.findall(r"^\| (\d) \| (.*) \|$", TEXT, re.MULTILINE))
    helped = dict(re.findall(r"^  (\d)  (.*)$", arguments.EPILOG, re.MULTILINE))
    assert documented.keys() == helped.keys()
    assert all(helped[code].startswith(said) for code, said in documented.items())


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [choices] = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return choices
