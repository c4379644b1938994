"""Test that every option of every command has a help text, and that every variable named in one is read."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from typing import Any, NoReturn, get_args

import pytest
from processes import PROCESSES, Process

from coordinator.cli import arguments
from coordinator.cli.connection import AdminSettings
from edge_agent import cli as edge_cli
from edge_agent.config import EdgeSettings
from edge_agent.sdk.types import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Offline
from outrider.settings.layers import VARIABLE, Layers, flag_of, variable_of
from outrider.settings.options import choices_of, layers_of, metavar_of
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


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_that_takes_a_value_says_its_default(name: str) -> None:
    silent = [
        said
        for said, action in options(PARSERS[name]())
        if action.option_strings
        and action.nargs != 0
        and not action.required
        and "[default: " not in (action.help or "")
    ]
    assert [said for said in silent if not said.endswith("--check-config")] == []


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


@pytest.mark.parametrize("name", PARSERS)
def test_no_help_names_a_variable_that_nobody_reads(name: str) -> None:
    models = (AdminSettings, *(process.model for process in PROCESSES))
    read = {variable_of(model, field) for model in models for field in model.model_fields}
    named = {variable for _, action in options(PARSERS[name]()) for variable in _NAMED.findall(action.help or "")}
    assert named and named <= read | {VARIABLE}


@each
def test_every_setting_is_a_flag_but_for_secrets(process: Process) -> None:
    flags = {action.dest.removeprefix(_DEST) for _, action in options(process.parser()) if _DEST in action.dest}
    secrets = {name for name, field in process.model.model_fields.items() if is_secret(field)}
    assert flags == process.model.model_fields.keys() - secrets
    assert {flag_of(process.model, name) for name in secrets} == {""}


@each
def test_the_help_says_where_secrets_go(process: Process) -> None:
    words = " ".join(
        next(p for p in with_subparsers(process.parser()) if p.epilog and "TOML" in p.format_help()).epilog.split()
    )
    for name, field in process.model.model_fields.items():
        assert not is_secret(field) or variable_of(process.model, name) in words


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


def test_the_form_of_a_number_is_its_unit_and_a_rate_has_none() -> None:
    fields = {"drain_s": "SECONDS", "lease_ms": "MS", "stream_messages_per_s": "X"}
    known = {name: field for process in PROCESSES for name, field in process.model.model_fields.items()}
    assert {name: metavar_of(name, known[name]) for name in fields} == fields


@pytest.mark.parametrize(
    ("flags", "variables", "terms"),
    [
        ((), {}, {"timeout": DEFAULT_TIMEOUT, "retries": 2, "offline": "raise"}),
        (("--timeout", "9"), {"RETRIES": "5"}, {"timeout": 9.0, "retries": 5, "offline": "raise"}),
        (("--retries", "0"), {"RETRIES": "5", "TIMEOUT_S": "7"}, {"timeout": 7.0, "retries": 0, "offline": "raise"}),
        ((), {"OFFLINE": "draft_only"}, {"timeout": DEFAULT_TIMEOUT, "retries": 2, "offline": "draft_only"}),
    ],
)
async def test_what_a_servers_requests_have_in_common_is_a_setting(flags, variables, terms, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OUTRIDER_EDGE_SERVE_{name}", value)
    defaults: list[dict[str, Any]] = []

    def client(_: EdgeSettings, **given: Any) -> NoReturn:
        defaults.append(given)
        raise InterruptedError

    monkeypatch.setattr(edge_cli, "_client", client)
    options = edge_cli.parser().parse_args(["serve", *flags])
    with pytest.raises(InterruptedError):
        await options.run(options)
    assert defaults == [terms]


def test_a_server_takes_the_defaults_of_the_sdk() -> None:
    fields = EdgeSettings.model_fields
    assert fields["serve_retries"].default == DEFAULT_RETRIES
    assert choices_of(fields["serve_offline"]) == get_args(Offline)


def test_a_server_logs_its_requests_unless_set_otherwise_and_other_commands_warn(monkeypatch) -> None:
    def level(*arguments: str) -> str:
        return edge_cli._logging(edge_cli.parser().parse_args(arguments))[1]

    assert (level("serve"), level("generate", "x"), level("releases", "status")) == ("INFO", "WARNING", "WARNING")
    assert (level("serve", "--log-level", "ERROR"), level("serve", "--verbose")) == ("ERROR", "DEBUG")
    monkeypatch.setenv("OUTRIDER_EDGE_SERVE_LOG_LEVEL", "DEBUG")
    assert (level("serve"), level("generate", "x")) == ("DEBUG", "WARNING")


def test_an_origin_is_given_as_often_as_there_are_some() -> None:
    layers = parsed("edge", "serve", "--cors-origin", "http://a", "--cors-origin", "http://b")
    assert layers.raw("serve_cors_origins") == "http://a,http://b"


def test_tenants_are_named_as_before() -> None:
    assert str(parsed("coordinator", "--tenants", "t.toml").load().tenants_file) == "t.toml"
