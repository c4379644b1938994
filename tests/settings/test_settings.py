"""Test where settings come from, what is said of wrong ones, and that every option tells its variable and its unit."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import PROCESSES, Process, run, toml

from cloud_verifier.config import VerifierConfig
from coordinator.cli import arguments
from coordinator.config import CoordinatorConfig
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import BadRequest
from outrider.settings import VARIABLE, Layers, flag_of, is_secret, layers_of, variable_of

SECRET = "hush-hush"
each = pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
PARSERS = {**{process.name: process.parser for process in PROCESSES}, "operator": arguments.parser}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


# --- sources


@each
def test_a_setting_comes_from_the_first_source_that_has_it(process: Process, tmp_path: Path) -> None:
    flagged, variable, _ = process.numbers
    others = {other.name: {"nonsense": 1} for other in PROCESSES if other is not process}
    fields = process.model.model_fields
    in_file = {name: 2 if fields[name].annotation in (int, float) else "2" for name in process.numbers}
    file = toml(tmp_path / "o.toml", **others, **{process.name: {**process.needs, **in_file}})
    variables = {variable_of(process.model, flagged): "3", variable_of(process.model, variable): "3"}
    command = (*process.command, "--check-config", flag_of(process.model, flagged), "4")
    for where, more in (((), {VARIABLE: str(file)}), (("--config", str(file)), {VARIABLE: "another"})):
        ran = run(*command, *where, **variables, **more)
        assert (ran.returncode, ran.stderr) == (0, "")
        shown = json.loads(ran.stdout)["settings"]
        assert [str(shown[name]) for name in process.numbers] == ["4", "3", "2"] and shown["insecure"] is False


def test_an_alternative_of_a_lower_source_is_void(tmp_path: Path) -> None:
    file = toml(tmp_path / "o.toml", edge={"coordinator": "127.0.0.1:1"})
    settings = Layers(EdgeSettings, {"verifier": "127.0.0.1:2"}, file).load()
    assert (settings.verifier, settings.coordinator) == ("127.0.0.1:2", "")


def test_a_client_in_a_program_reads_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(toml(tmp_path / "o.toml", edge={"verifier": "127.0.0.1:9"})))
    assert AsyncClient()._sessions.settings.verifier == "127.0.0.1:9"


def test_switches_have_two_forms_and_objects_are_json() -> None:
    def parsed(at: int, *arguments: str) -> Layers:
        return layers_of(PROCESSES[at].model, PROCESSES[at].parser().parse_args(arguments))

    assert parsed(0, "--insecure").raw("insecure") is True
    assert parsed(0, "--no-window-control").load().window_control is False
    assert parsed(0).load().window_control is True
    layers = parsed(3, "run", "--training-options", '{"steps": 3}')
    assert layers.raw("training_options") == {"steps": 3}


# --- what is wrong


def refusal(cls, flags=None, file: Path | None = None) -> list[str]:
    with pytest.raises(BadRequest) as caught:
        Layers(cls, flags or {}, file).load()
    return str(caught.value).split("\n  ")


def test_all_that_is_wrong_is_said_at_once_with_its_source_and_what_was_got(tmp_path: Path, monkeypatch) -> None:
    tables = {"verifier": {"kv_slots": "many", "thraeds": 4}, "verifer": {"a": 1}}
    file = toml(tmp_path / "o.toml", **tables)
    monkeypatch.setenv("OUTRIDER_VERIFIER_MAX_SESSIONS", "0")
    assert sorted(refusal(VerifierConfig, {"threads": "four"}, file)[1:]) == sorted(
        [
            f"{file}: [verifer]: no such table; tables are coordinator, verifier, edge, distill",
            f"{file}: [verifier] thraeds: there is no such setting",
            "--threads: Input should be a valid integer, unable to parse string as an integer, got 'four'",
            f"{file}: [verifier] kv_slots: Input should be a valid integer, unable to parse string as an integer, got"
            " 'many'",
            "OUTRIDER_VERIFIER_MAX_SESSIONS: Input should be greater than or equal to 1, got '0'",
            "model: must be given, as --model, OUTRIDER_VERIFIER_MODEL or in [verifier] of a --config file",
        ]
    )


@pytest.mark.parametrize(
    ("cls", "settings", "said"),
    [
        (CoordinatorConfig, {"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
        (VerifierConfig, {"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
    ],
)
def test_certificates_that_nobody_would_ask_for_or_show_are_refused(cls: type, settings: dict, said: str) -> None:
    assert any(said in line for line in refusal(cls, settings))


@pytest.mark.parametrize("keys", [f'["{SECRET}"]', SECRET, f'{{"a": ["{SECRET}"]}}'])
def test_no_complaint_repeats_a_secret(tmp_path: Path, monkeypatch, keys: str) -> None:
    monkeypatch.setenv("OUTRIDER_COORDINATOR_TENANT_KEYS", keys)
    url = f"redis://me:{SECRET * 10}/{SECRET * 10}@host"
    wrong = {"admin_tokn": SECRET, "join_token": [SECRET], "report_interval_ms": url}
    said = "".join(refusal(CoordinatorConfig, {"redis": url}, toml(tmp_path / "o.toml", coordinator=wrong)))
    assert SECRET not in said and "redis://***@host" in said and "join_token" in said


@pytest.mark.parametrize("content", [b"[coordinator]\nlisten = ", b"a = '\xff'", b"a = " + b"[" * 100_000])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "o.toml"
    file.write_bytes(content)
    assert refusal(CoordinatorConfig, {}, file)[0].startswith(f"{file} is no TOML: ")
    assert (
        refusal(CoordinatorConfig, {}, tmp_path / "none")[0]
        == f"{tmp_path}/none cannot be read: No such file or directory"
    )


# --- options


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield (command and name, option) of a parser and of all commands below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from options(child)
        else:
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_help_text(name: str) -> None:
    found = list(options(PARSERS[name]()))
    assert len(found) > 10
    assert [said for said, action in found if len((action.help or "").split()) < 2] == []


@each
def test_every_setting_but_a_secret_is_a_flag_that_tells_its_variable_and_its_unit(process: Process) -> None:
    units = {"_ms": "millisecond", "_s": "second", "_minutes": "minutes", "_days": "days", "_bytes": "bytes"}
    prefix = "setting:"
    flags = {
        action.dest.removeprefix(prefix): action for _, action in options(process.parser()) if prefix in action.dest
    }
    assert flags.keys() == {name for name, field in process.model.model_fields.items() if not is_secret(field)}
    for name, action in flags.items():
        assert re.findall(r"\[env: (\w+)\]", action.help) == [variable_of(process.model, name)]
        assert next((unit for end, unit in units.items() if name.endswith(end)), "") in action.help.lower(), name
