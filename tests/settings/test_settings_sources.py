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


def test_a_client_in_a_program_reads_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path / "o.toml", edge={"verifier": "127.0.0.1:9", "draft_workers": 3})
    monkeypatch.setenv(VARIABLE, str(file))
    assert from_environment(EdgeSettings).draft_workers == 3
    assert AsyncClient()._sessions.settings.verifier == "127.0.0.1:9"


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
