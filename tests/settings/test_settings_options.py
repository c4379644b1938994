"""Test that every option of every command has a help text, and that every variable named in one is read."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

import pytest
from processes import PROCESSES, Process

from coordinator.cli import arguments
from outrider.settings.layers import Layers, flag_of
from outrider.settings.options import layers_of
from outrider.settings.problems import is_secret

_NAMED = re.compile(r"\[env: (\w+)\]")
_DEST = "setting:"
each = pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
PARSERS = {**{process.name: process.parser for process in PROCESSES}, "operator": arguments.parser}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


def with_subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and all parsers below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from with_subparsers(child)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield (command and name, option) of all commands below it."""
    for each_parser in with_subparsers(parser):
        for action in each_parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                yield f"{each_parser.prog} {'/'.join(action.option_strings) or action.dest}", action


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_and_every_command_has_a_help_text(name: str) -> None:
    found = list(options(PARSERS[name]()))
    assert len(found) > 10
    assert [said for said, action in found if len((action.help or "").split()) < 2] == []
    for parser in with_subparsers(PARSERS[name]()):
        parser.format_help()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                assert {choice.dest for choice in action._choices_actions if choice.help} == action.choices.keys()


@each
def test_every_variable_of_an_option_is_the_one_that_is_read(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, action in options(process.parser()):
        if not action.dest.startswith(_DEST):
            continue
        name = action.dest.removeprefix(_DEST)
        [variable] = _NAMED.findall(action.help or "")
        assert Layers(process.model).source(name) == "default", said
        monkeypatch.setenv(variable, "17")
        layers = Layers(process.model)
        assert (layers.source(name), str(layers.raw(name))) == ("environment", "17"), said
        monkeypatch.delenv(variable)


@each
def test_every_setting_is_a_flag_but_for_secrets(process: Process) -> None:
    flags = {action.dest.removeprefix(_DEST) for _, action in options(process.parser()) if _DEST in action.dest}
    secrets = {name for name, field in process.model.model_fields.items() if is_secret(field)}
    assert flags == process.model.model_fields.keys() - secrets
    assert {flag_of(process.model, name) for name in secrets} == {""}


@each
def test_every_setting_is_described_with_its_unit(process: Process) -> None:
    units = {"_ms": "millisecond", "_s": "second", "_minutes": "minutes", "_days": "days", "_bytes": "bytes"}
    for name, field in process.model.model_fields.items():
        text = (field.description or "").lower()
        assert len(text.split()) >= 3, name
        unit = next((unit for end, unit in units.items() if name.endswith(end)), "")
        assert unit in text, f"{name}: {text}"


# --- forms of flags


def parsed(name: str, *arguments: str) -> Layers:
    [process] = [process for process in PROCESSES if process.name == name]
    return layers_of(process.model, process.parser().parse_args(arguments))


def test_a_switch_can_be_turned_on_and_off() -> None:
    assert parsed("coordinator", "--insecure").raw("insecure") is True
    assert parsed("coordinator", "--no-window-control").load().window_control is False
    assert parsed("coordinator").load().window_control is True


def test_objects_and_lists_are_json() -> None:
    layers = parsed("distill", "run", "--training-options", '{"steps": 3}', "--widened", '["a", "b"]')
    assert (layers.raw("training_options"), layers.raw("widened")) == ({"steps": 3}, ["a", "b"])
