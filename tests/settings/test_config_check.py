"""Test `outrider config check`, which checks every table without starting anything."""

from __future__ import annotations

import json
from pathlib import Path

from processes import PROCESSES, run, toml

SECRET = "hush-hush-hush-hush"
COMMAND = ("coordinator.cli", "config", "check")


def test_what_is_right_is_shown_without_secrets(tmp_path: Path) -> None:
    given = {"redis": f"redis://me:{SECRET}@host", "admin_token": SECRET}
    deep = json.dumps({"other_config": {"store": [f"https://me:{SECRET}@host"]}})
    file = toml(tmp_path / "o.toml", coordinator=given, verifier={"threads": 4, "join_token": SECRET})
    variables = {"OUTRIDER_COORDINATOR_CANARY_TENANTS": "9", "OUTRIDER_EDGE_API_KEY": SECRET}
    variables |= {"OUTRIDER_VERIFIER_ENGINE": "vllm", "OUTRIDER_VERIFIER_ENGINE_ARGS": deep}
    ran = run(*COMMAND, str(file), "-o", "json", **variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert SECRET not in ran.stdout
    document = json.loads(ran.stdout)
    assert (document["file"], document["problems"]) == (str(file), [])
    shown = {process["process"]: process["settings"] for process in document["processes"]}
    assert shown["coordinator"]["redis"] == "redis://***@host"
    assert set(shown["coordinator"]["admin_token"]) == set(shown["edge"]["api_key"]) == {"*"}
    assert (shown["coordinator"]["join_token"], shown["coordinator"]["canary"]["tenants"]) == (None, 9)
    assert shown["verifier"]["engine_args"]["other_config"] == {"store": ["https://***@host"]}
    assert shown["verifier"]["threads"] == 4 and document["processes"][1]["missing"] == ["model"]
    assert shown.keys() == {process.name for process in PROCESSES}


def test_all_that_is_wrong_is_said_once_as_it_would_be_at_the_start(tmp_path: Path) -> None:
    file = toml(
        tmp_path / "o.toml",
        coordinator={"report_interval_ms": 1, "lissten": "x"},
        verifier={"threads": "four"},
        edge={"serve_listen": "0.0.0.0:8080"},
    )
    ran = run(*COMMAND, str(file), "-o", "json", OUTRIDER_DISTILL_FRESH_TOKENS="0")
    assert ran.returncode == 2
    said = ran.stderr.splitlines()
    assert said == [f"outrider: {problem}" for problem in json.loads(ran.stdout)["problems"]] and len(said) == 5
    for part in (
        f"{file}: [coordinator] report_interval_ms: Input should be greater than or equal to 20, got 1",
        f"{file}: [coordinator] lissten: there is no such setting",
        f"{file}: [verifier] threads: Input should be a valid integer",
        "edge: listen is 0.0.0.0:8080: others than this machine could use the cluster",
        "OUTRIDER_DISTILL_FRESH_TOKENS: Input should be greater than or equal to 1, got '0'",
    ):
        assert len([line for line in said if part in line]) == 1, part


def test_one_process_is_checked_with_its_flags(tmp_path: Path) -> None:
    file = toml(tmp_path / "o.toml", verifier={"threads": 4})
    wrong = run("cloud_verifier.app", "--config", str(file), "--kv-slots", "1", "--check-config")
    assert wrong.returncode == 2
    assert "outrider-verifier: --kv-slots: Input should be greater than or equal to 256" in wrong.stderr
    assert "outrider-verifier: model: must be given" in wrong.stderr
