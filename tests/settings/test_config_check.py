"""Test `outrider config check`, which checks every table without starting anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import PROCESSES, run_here, toml

SECRET = "hush-hush-hush-hush"
COMMAND = ("coordinator.cli", "config", "check")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toml(
        tmp_path_factory.mktemp("good") / "o.toml",
        coordinator={"redis": f"redis://me:{SECRET}@host", "admin_token": SECRET},
        verifier={"threads": 4, "join_token": SECRET},
    )


def test_what_is_right_is_shown_with_its_source_and_without_secrets(good: Path) -> None:
    ran = run_here(
        *COMMAND, str(good), "-o", "json", OUTRIDER_COORDINATOR_CANARY_TENANTS="9", OUTRIDER_EDGE_API_KEY=SECRET
    )
    assert ran.returncode == 0, ran.stderr
    assert SECRET not in ran.stdout + ran.stderr
    document = json.loads(ran.stdout)
    assert (document["file"], document["problems"], document["warnings"]) == (str(good), [], [])
    shown = {
        f"{process['process']}.{setting['name']}": (setting["value"], setting["source"])
        for process in document["processes"]
        for setting in process["settings"]
    }
    assert shown["coordinator.redis"] == ("redis://me:********@host", "file")
    assert shown["coordinator.admin_token"] == ("********", "file")
    assert shown["coordinator.join_token"] == (None, "default")
    assert shown["coordinator.canary_tenants"] == (9, "environment")
    assert shown["verifier.threads"] == (4, "file")
    assert shown["edge.api_key"] == ("********", "environment")
    assert len(shown) == sum(len(process.model.model_fields) for process in PROCESSES)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = toml(
        tmp_path / "o.toml",
        coordinator={"report_interval_ms": 1, "lissten": "x"},
        verifier={"model": "m", "threads": "four"},
        edge={"serve_listen": "0.0.0.0:8080"},
        distil={"threads": 1},
    )
    ran = run_here(*COMMAND, str(file), "-o", "json", OUTRIDER_DISTILL_THREADS="0")
    assert ran.returncode == 2
    said = ran.stderr.splitlines()
    assert said == [f"outrider: {problem}" for problem in json.loads(ran.stdout)["problems"]] + [
        "outrider: distill needs traffic, target, draft, artifacts in addition, on its command line"
    ]
    for part in (
        f"{file}: [distil]: no such table; the nearest is distill",
        f"{file}: [coordinator] report_interval_ms: Input should be greater than or equal to 20, got 1",
        f"{file}: [coordinator] lissten: no such setting; the nearest is listen",
        f"{file}: [verifier] threads: Input should be a valid integer",
        "OUTRIDER_DISTILL_THREADS: Input should be greater than or equal to 1, got '0'",
    ):
        assert len([line for line in said if part in line]) == 1, part


def test_what_would_be_refused_at_the_start_is_refused(tmp_path: Path) -> None:
    file = toml(tmp_path / "o.toml", coordinator={"listen": "0.0.0.0:7700"}, edge={"serve_listen": "0.0.0.0:8080"})
    ran = run_here(*COMMAND, str(file))
    assert ran.returncode == 2
    assert "coordinator: listening beyond loopback needs API keys" in ran.stderr
    assert "edge: listen is 0.0.0.0:8080: others than this machine could use the cluster" in ran.stderr


def test_one_process_is_checked_with_its_flags(tmp_path: Path) -> None:
    file = toml(tmp_path / "o.toml", verifier={"threads": 4})
    flags = ("--model", "m", "--kv-slots", "512")
    right = run_here("cloud_verifier.app", "--config", str(file), *flags, "--check-config")
    assert (right.returncode, right.stderr) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in right.stdout.splitlines()}
    assert (lines["model"], lines["threads"], lines["kv_slots"]) == (["m", "flag"], ["4", "file"], ["512", "flag"])
    wrong = run_here("cloud_verifier.app", "--config", str(file), "--kv-slots", "1", "--check-config")
    assert wrong.returncode == 2
    assert "outrider-verifier: --kv-slots: Input should be greater than or equal to 256" in wrong.stderr
    assert "outrider-verifier: model: Field required" in wrong.stderr
