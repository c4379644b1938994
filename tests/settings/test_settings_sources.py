"""Test that flags override the environment, the environment the file, and the file the defaults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import PROCESSES, Process, run, settings_shown, toml

from coordinator.config import CoordinatorConfig
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import BadRequest
from outrider.settings.layers import MAX_BYTES, VARIABLE, Layers, flag_of, from_environment, variable_of

each = pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


@each
def test_a_process_takes_each_setting_from_the_first_source_that_has_it(process: Process, tmp_path: Path) -> None:
    flagged, variable, filed = process.numbers
    file = toml(tmp_path / "o.toml", **{process.name: {**process.needs, flagged: 2, variable: 2, filed: 2}})
    ran = run(
        *(*process.command, "--config", str(file), "--check-config", "json", flag_of(process.model, flagged), "4"),
        **{variable_of(process.model, flagged): "3", variable_of(process.model, variable): "3"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    settings = settings_shown(ran)
    assert [(settings[name]["value"], settings[name]["source"]) for name in process.numbers] == [
        (4, "flag"),
        (3, "environment"),
        (2, "file"),
    ]
    assert settings["log_format"]["value"] == "text" and settings["log_format"]["source"] == "default"


@each
def test_a_process_reads_its_own_table_alone(process: Process, tmp_path: Path) -> None:
    others = {other.name: {"nonsense": 1} for other in PROCESSES if other is not process}
    file = toml(tmp_path / "o.toml", **others, **{process.name: {**process.needs, process.numbers[0]: 5}})
    assert getattr(Layers(process.model, {}, file).load(), process.numbers[0]) == 5


@each
def test_the_environment_names_the_file_where_no_flag_does(process: Process, tmp_path: Path) -> None:
    first, second = (
        toml(tmp_path / f"{number}.toml", **{process.name: {**process.needs, process.numbers[0]: number}})
        for number in (6, 7)
    )
    by_variable = run(*process.command, "--check-config", "json", **{VARIABLE: str(first)})
    by_flag = run(*process.command, "--check-config", "json", "--config", str(second), **{VARIABLE: str(first)})
    assert [settings_shown(ran)[process.numbers[0]]["value"] for ran in (by_variable, by_flag)] == [6, 7]


def test_no_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("outrider.toml", "config.toml", "pyproject.toml"):
        toml(tmp_path / name, coordinator={"max_rpcs": 2})
    monkeypatch.chdir(tmp_path)
    assert Layers(CoordinatorConfig).load().max_rpcs == CoordinatorConfig().max_rpcs == 1024


def test_a_client_in_a_program_reads_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path / "o.toml", edge={"verifier": "127.0.0.1:9", "siblings": 2})
    monkeypatch.setenv(VARIABLE, str(file))
    assert from_environment(EdgeSettings).siblings == 2
    assert AsyncClient()._sessions.settings.verifier == "127.0.0.1:9"


def test_an_address_stands_for_itself_where_a_lower_source_has_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path / "o.toml", edge={"coordinator": "in-file:1"})
    monkeypatch.setenv("OUTRIDER_EDGE_VERIFIER", "in-environment:2")
    by_variable = Layers(EdgeSettings, {}, file).load()
    assert (by_variable.coordinator, by_variable.verifier) == ("", "in-environment:2")
    by_flag = Layers(EdgeSettings, {"coordinator": "flag:3"}, file).load()
    assert (by_flag.coordinator, by_flag.verifier) == ("flag:3", "")


def test_objects_of_two_sources_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "o.toml"
    file.write_text('[coordinator.tenant_keys]\nacme = "a-key-of-16-or-more"\nbeta = "in the file alone"')
    monkeypatch.setenv("OUTRIDER_COORDINATOR_TENANT_KEYS", '{"acme": "from the environment"}')
    keys = Layers(CoordinatorConfig, {}, file).load().tenant_keys
    assert {name: key.get_secret_value() for name, key in keys.items()} == {
        "acme": "from the environment",
        "beta": "in the file alone",
    }


# --- files that cannot be


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[coordinator]\nlisten = ", "is no TOML: Invalid value (at end of document)"),
        (b"[coordinator]\nlisten = '\xff'", "is not UTF-8: got byte 0xff at offset 24"),
        (b"# " + b"x" * MAX_BYTES, f"has more than {MAX_BYTES} bytes"),
        (b"a = " + b"[" * 100_000, "is no TOML"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "o.toml"
    file.write_bytes(content)
    with pytest.raises(BadRequest) as caught:
        Layers(CoordinatorConfig, {}, file)
    assert str(caught.value).startswith(f"{file} ")
    assert said in str(caught.value)


@pytest.mark.parametrize(("name", "said"), [("absent.toml", "No such file"), (".", "is no regular file")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        Layers(CoordinatorConfig, {}, tmp_path / name)


@each
def test_a_process_ends_with_2_and_one_line_where_its_file_cannot_be_read(process: Process, tmp_path: Path) -> None:
    ran = run(*process.command, "--config", str(tmp_path / "absent.toml"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert (
        ran.stderr == f"outrider-{process.name}: {tmp_path / 'absent.toml'} cannot be read: No such file or directory\n"
    )
