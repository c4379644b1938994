"""Test the operator's command with missing or wrong settings; the rest of it is tested end to end."""

import asyncio
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.cli import local
from coordinator.cli.arguments import parse
from coordinator.cluster import Child, Cluster
from outrider.core.addresses import DEFAULT_COORDINATOR
from outrider.core.errors import BadRequest, Unavailable

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "models" / "target")


def run_without(modules, *arguments):
    """Run the command as if these modules were not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from coordinator.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("up", "torch", "verifier"), ("demo", "llama_cpp", "edge")],
)
def test_a_missing_extra_is_named_in_one_line_before_anything_starts(tmp_path, command, module, extra):
    ran = run_without([module], command, "--model", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (2, "")
    [line] = ran.stderr.splitlines()
    assert line.startswith(f"outrider: {module} is missing: pip install 'outrider[")
    assert extra in line


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
def test_every_line_of_a_child_says_who_speaks_and_json_has_no_plain_ones(line, capsys):
    local._print_log("verifier-2", line)
    assert capsys.readouterr().err == f"verifier-2: {line}\n"
    form = local._log_format.set("json")
    try:
        local._print_log("verifier-2", line)
    finally:
        local._log_format.reset(form)
    said = json.loads(capsys.readouterr().err)
    assert said["process"] == "verifier-2" and {"level", "message"} <= said.keys()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["up", "--log-format", "xml"], "xml"),
        (["up", "--verifiers", "0"], "must be at least 1, got 0"),
        (["demo", "--rtt-ms", "nan"], "must be from 0 to 60000, got nan"),
        (["status", "--coordinator", "127.0.0.1"], "--coordinator: must be HOST:PORT"),
    ],
)
def test_senseless_values_are_refused_before_anything_starts(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["up", "--model", TARGET, "--listen", "127.0.0.1:0", "--start-timeout-s", "0.01"], 4, "--start-timeout-s"),
        (["demo"], 2, "clone of the repository"),
    ],
)
def test_what_cannot_work_is_reported_with_the_way_out(arguments, code, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "{tmp}/absent"], "--model {tmp}/absent: no such folder"),
        (["--model", TARGET, "--draft", "{tmp}/absent.gguf"], "--draft {tmp}/absent.gguf: no such file"),
        (["--model", TARGET, "--draft", "{tmp}/damaged.gguf"], "--draft {tmp}/damaged.gguf: no token can be decoded"),
    ],
)
def test_up_names_the_flag_of_what_is_not_there_before_anything_starts(arguments, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 1000)
    monkeypatch.setattr(Cluster, "_start", lambda *_: pytest.fail("something was started"))
    given = ["up", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"), *arguments]
    with pytest.raises(SystemExit) as ended:
        cli.main([word.format(tmp=tmp_path) for word in given])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"outrider: {said.format(tmp=tmp_path)}")


def test_up_passes_given_tokens_on_and_makes_the_others(monkeypatch):
    made, variables = local._tokens(None)
    assert set(made) == {"admin", "join"}
    assert variables["OUTRIDER_VERIFIER_JOIN_TOKEN"] == variables["OUTRIDER_COORDINATOR_JOIN_TOKEN"] == made["join"]
    assert variables["OUTRIDER_COORDINATOR_ADMIN_TOKEN"] == made["admin"]
    assert local._tokens(None)[0] != made
    monkeypatch.setenv("OUTRIDER_COORDINATOR_ADMIN_TOKEN", "given-admin-token")
    monkeypatch.setenv("OUTRIDER_VERIFIER_JOIN_TOKEN", "given-join-token")
    made, variables = local._tokens(None)
    assert made == {}
    assert set(variables.values()) == {"given-join-token"}


async def test_the_verifiers_of_up_have_the_join_token_alone(monkeypatch):
    """Whoever breaks into a verifier shall not find what administers the cluster."""
    monkeypatch.setenv("OUTRIDER_COORDINATOR_TENANT_KEYS", '{"acme": "key-of-acme-0123456789"}')
    made, variables = local._tokens(None)
    given = {}

    async def start(name, command, *, environment, **_):
        given[name] = repr(environment)
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


async def test_a_process_that_refuses_its_settings_is_a_wrong_command_line(tmp_path):
    for code, kind in ((2, BadRequest), (1, Unavailable)):
        with pytest.raises(kind) as caught:
            await Child.start("verifier-1", [sys.executable, "-c", f"raise SystemExit({code})"], log=tmp_path / "log")
        assert cli.exit_code(caught.value) == {2: 2, 1: 4}[code]
