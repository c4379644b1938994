"""Test that a message about wrong settings names the place, the value and similar names, and never a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import toml

from cloud_verifier.config import VerifierConfig
from coordinator.config import CoordinatorConfig
from outrider.settings.layers import Layers
from outrider.settings.problems import WrongSettings

SECRET = "hush-hush"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


def refusal(cls, flags=None, file: Path | None = None) -> list[str]:
    """Load settings and return every problem as text."""
    with pytest.raises(WrongSettings) as caught:
        Layers(cls, flags or {}, file).load()
    return [str(problem) for problem in caught.value.problems]


def test_a_wrong_value_is_reported_with_its_source_and_what_was_got(tmp_path: Path, monkeypatch) -> None:
    file = toml(tmp_path / "o.toml", verifier={"model": "m", "kv_slots": "many"})
    monkeypatch.setenv("OUTRIDER_VERIFIER_MAX_SESSIONS", "0")
    assert refusal(VerifierConfig, {"threads": "four"}, file) == [
        "--threads: Input should be a valid integer, unable to parse string as an integer, got 'four'",
        f"{file}: [verifier] kv_slots: Input should be a valid integer, unable to parse string as an integer, got"
        " 'many'",
        "OUTRIDER_VERIFIER_MAX_SESSIONS: Input should be greater than or equal to 1, got '0'",
    ]


def test_an_unknown_key_or_table_is_reported_with_what_is_near(tmp_path: Path) -> None:
    file = toml(tmp_path / "o.toml", coordinator={"lissten": "x"}, verifer={"a": 1}, nothing={"a": 1})
    assert refusal(CoordinatorConfig, {}, file) == [
        f"{file}: [verifer]: no such table; the nearest is verifier; tables are coordinator, verifier, edge, distill",
        f"{file}: [nothing]: no such table; tables are coordinator, verifier, edge, distill",
        f"{file}: [coordinator] lissten: no such setting; the nearest is listen",
    ]


def test_a_missing_setting_is_reported_with_all_ways_to_give_it() -> None:
    assert refusal(VerifierConfig) == [
        "model: Field required; give it as --model, OUTRIDER_VERIFIER_MODEL or in [verifier] of a --config file"
    ]


@pytest.mark.parametrize(
    ("cls", "settings", "said"),
    [
        (CoordinatorConfig, {"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
        (VerifierConfig, {"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
        (VerifierConfig, {"coordinator_ca": "a", "coordinator_key": "k"}, "coordinator_cert and coordinator_key go"),
        (VerifierConfig, {"coordinator_cert": "c", "coordinator_key": "k"}, "coordinator_cert needs coordinator_ca"),
    ],
)
def test_certificates_that_nobody_would_ask_for_or_show_are_refused(cls: type, settings: dict, said: str) -> None:
    assert said in refusal(cls, settings)[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ADMIN_TOKN", SECRET),
        ("TENANT_KEYS", f'["{SECRET}"]'),
        ("TENANT_KEYS", SECRET),
        ("TENANT_KEYS", f'{{"a": ["{SECRET}"]}}'),
    ],
)
def test_no_complaint_repeats_a_secret(tmp_path: Path, monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"OUTRIDER_COORDINATOR_{name}", value)
    file = toml(
        tmp_path / "o.toml", coordinator={"admin_tokn": SECRET, "join_token": [SECRET], "report_interval_ms": 0}
    )
    layers = Layers(CoordinatorConfig, {"redis": f"redis://me:{SECRET}@host"}, file)
    _, problems = layers.attempt()
    assert len(problems) >= 3
    assert SECRET not in "".join([*map(str, problems), *layers.warnings()])


def test_what_a_url_holds_is_no_more_shown_than_another_secret() -> None:
    [said] = refusal(CoordinatorConfig, {"report_interval_ms": f"redis://me:{SECRET}@host"})
    assert SECRET not in said and "redis://me:********@host" in said


# --- warnings


def test_a_secret_in_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path) -> None:
    file = toml(tmp_path / "o.toml", coordinator={"admin_token": SECRET})
    assert list(Layers(CoordinatorConfig, {}, file).warnings()) == []
    file.chmod(0o644)
    [said] = Layers(CoordinatorConfig, {}, file).warnings()
    assert said == (
        f"{file} holds admin_token and everybody on this machine can read it: chmod o-r {file}, or set"
        " OUTRIDER_COORDINATOR_ADMIN_TOKEN in the environment"
    )


def test_a_variable_that_no_setting_has_is_warned_of(monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER_THREDS", "4")
    monkeypatch.setenv("OUTRIDER_VERIFIER_XYZZY", "4")
    assert list(Layers(VerifierConfig).warnings()) == [
        "OUTRIDER_VERIFIER_THREDS is set, and there is no such setting; the nearest is OUTRIDER_VERIFIER_THREADS",
        "OUTRIDER_VERIFIER_XYZZY is set, and there is no such setting",
    ]
