"""Test the operator's command with missing or wrong settings; the rest of it is tested end to end."""

import asyncio
import json
import sys
import types
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.cli import local
from coordinator.cli.arguments import parse
from coordinator.cluster import Child, Cluster
from outrider.core.addresses import DEFAULT_COORDINATOR


@pytest.mark.parametrize(
    ("given", "variables", "passed"),
    [
        ("--message hi --tls", {}, f"--coordinator {DEFAULT_COORDINATOR} --message hi --tls"),
        ("--coordinator a:1 --top-p 0.9", {}, "--coordinator a:1 --top-p 0.9"),
        ("--draft none --verifier=b:2", {}, "--verifier b:2 --draft none"),
        ("--message hi", {"OUTRIDER_EDGE_VERIFIER": "b:2"}, "--message hi"),
        ("--config named.toml", {}, "--config named.toml"),
        ("", {"OUTRIDER_CONFIG": "named.toml"}, ""),
        ("", {"OUTRIDER_CONFIG": "silent.toml"}, f"--coordinator {DEFAULT_COORDINATOR}"),
    ],
)
def test_chat_passes_on_what_it_does_not_know_and_the_cluster_unless_settings_name_one(
    given, variables, passed, monkeypatch, tmp_path
):
    ran = []
    monkeypatch.setattr("os.execv", lambda _, command: ran.append(command[4:]) or sys.exit(0))
    monkeypatch.chdir(tmp_path)
    Path("named.toml").write_text("[edge]\ncoordinator = 'c:3'")
    Path("silent.toml").write_text("[edge]\ndraft_workers = 2")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main(["chat", *given.split()])
    assert ran == [passed.split()]


@pytest.mark.parametrize(("command", "module", "extra"), [("up", "torch", "verifier"), ("demo", "llama_cpp", "edge")])
def test_a_missing_extra_is_named_before_anything_starts(command, module, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.setattr(Cluster, "_start", lambda *_: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--model", str(tmp_path)])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"outrider: {module} is missing: pip install") and extra in line


def test_nothing_is_downloaded_if_there_is_no_draft_for_it(monkeypatch, capsys):
    monkeypatch.setattr(local, "DRAFT", "absent.gguf")
    monkeypatch.setattr(local.subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["up"])
    assert ended.value.code == 2 and "models/absent.gguf: no such file" in capsys.readouterr().err


def test_without_a_model_smollm2_is_made_and_its_folder_served(monkeypatch, tmp_path):
    made = types.SimpleNamespace(returncode=0, stdout=f"{tmp_path}\n")
    monkeypatch.setattr(local.subprocess, "run", lambda *_, **__: made)
    pair = local._pair(parse(["up", "--draft", "d.gguf"]))
    assert pair == ["--model", str(tmp_path), "--draft", "d.gguf"]
    assert local._pair(parse(["up"]), elsewhere={"draft"}) == ["--model", str(tmp_path)]
    made.returncode = 4
    with pytest.raises(SystemExit) as ended:
        local._pair(parse(["demo", "--draft", "d.gguf"]))
    assert ended.value.code == 4


def test_up_reads_the_file_that_its_processes_read(tmp_path, monkeypatch, capsys):
    file = tmp_path / "o.toml"
    file.write_text(f"[verifier]\nmodel = '{tmp_path}/absent'")
    monkeypatch.setattr(Cluster, "_start", lambda *_: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["up", "--config", str(file)])
    assert ended.value.code == 2
    assert f"o.toml: [verifier] model {tmp_path}/absent: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["2026-11-23 12:00:00,123 verifier INFO loading é", '{"level": "INFO", "message": "é"}', "[1]"]
)
def test_every_line_of_a_child_says_who_speaks_and_json_has_no_plain_ones(line, capsys, monkeypatch):
    local._print_log("verifier-2", line)
    assert capsys.readouterr().err == f"verifier-2: {line}\n"
    monkeypatch.setenv("OUTRIDER_LOG_FORMAT", "json")
    local._print_log("verifier-2", line)
    said = json.loads(capsys.readouterr().err)
    assert said["process"] == "verifier-2" and {"level", "message"} <= said.keys()


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ("--coordinator a:1 --tls status", "verifiers.status"),
        ("--coordinator=a:1 --tls releases list", "releases.list_releases"),
        ("releases --coordinator a:1 --tls", "releases.list_releases"),
        ("--coordinator a:1 releases --tls -o json", "releases.list_releases"),
        ("--coordinator b:2 --tls sessions list --coordinator a:1", "sessions.list_sessions"),
        ("--tls window --coordinator a:1", "sessions.show_windows"),
    ],
)
def test_the_flags_of_the_connection_may_stand_before_a_command_and_a_noun_alone_lists(arguments, action):
    options = parse(arguments.split())
    assert (options.action, options.coordinator, options.tls, options.ca) == (action, "a:1", True, None)


def test_a_flag_before_a_command_reaches_the_one_that_has_it_and_no_other(capsys):
    assert str(parse(["--ca", "x.pem", "up"]).ca) == "x.pem"
    assert parse(["--insecure", "up"]).insecure and not parse(["up"]).insecure
    assert parse(["--coordinator", "a:1", "chat", "--message", "sessions"]).coordinator == "a:1"
    for wrong in ("--coordinator a:1 up", "--tls demo", "releases lst"):
        with pytest.raises(SystemExit) as ended:
            parse(wrong.split())
        assert ended.value.code == 2
    assert "--coordinator before up" in (said := capsys.readouterr().err) and "'lst'" in said


async def test_the_verifiers_of_up_have_the_join_token_alone(monkeypatch):
    """Whoever breaks into a verifier shall not find what administers the cluster."""
    monkeypatch.setenv("OUTRIDER_COORDINATOR_TENANT_KEYS", '{"acme": "key-of-acme-0123456789"}')
    made, variables = local._tokens(None)
    given = {}

    async def start(child):
        given[child.name] = repr(child._environment)
        return types.SimpleNamespace(address="a:1", stop=lambda: asyncio.sleep(0))

    monkeypatch.setattr(Child, "start", start)
    async with Cluster(environment=variables) as cluster:
        await cluster.start_coordinator()
        await cluster.start_verifier()
    coordinator, verifier = given["coordinator"], given["verifier-1"]
    assert made["admin"] in coordinator
    assert "key-of-acme" in coordinator
    assert made["join"] in verifier
    assert made["admin"] not in verifier
    assert "OUTRIDER_COORDINATOR_" not in verifier
