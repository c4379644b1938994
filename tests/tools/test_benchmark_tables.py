"""Test that figures of docs/benchmarks.md come from results, and that a stale page is noticed."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.results import Machine, Result
from tools import benchmark_tables
from tools.benchmark_tables import EARLIER, renewed

LAST = {"ratio": {"greedy": 1.234, "T=0.8": None}, "by_sessions": {"1": 1.0, "4": 0.5}, "shares": [0.25, 0.125], "n": 3}


def result(**changes: Any) -> Result:
    fields = {"name": "rules", "command": ("-m", "benchmarks.rules"), "commit": "0123abcd4567", "status": 0}
    return Result.model_validate({**fields, "date": datetime.date(2026, 1, 2), "last": LAST, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    result().write(tmp_path)
    return tmp_path


def page(template: str, name: str = "rules", text: str = "") -> str:
    return f"before\n\n<!-- results: {name}\n{template}\n-->\n{text}<!-- end: results -->\n\nafter"


def generated(template: str, folder: Path) -> str:
    """Return what is generated between the comments of a block with this template."""
    new = renewed(page(template), folder, lambda _: False)
    assert new.startswith(f"before\n\n<!-- results: rules\n{template}\n-->\n") and new.endswith("\n\nafter")
    return new.partition("-->\n")[2].partition("<!-- end")[0]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("| {ratio/greedy:.2f}x | {n} |", "| 1.23x | 3 |"),
        ("{ratio/T=0.8:.2f}", "-"),
        ("{by_sessions:.2f}", "1.00 / 0.50"),
        ("{shares:.3f} and {shares/1:.1%}", "0.250 / 0.125 and 12.5%"),
        ("no figure", "no figure"),
    ],
)
def test_a_template_is_filled_with_the_figures_of_the_last_line(template: str, shown: str, folder: Path) -> None:
    recorded = "Recorded 2026-01-02 in 0123abcd by `python -m benchmarks.rules`."
    assert generated(template, folder) == f"{recorded}\n\n{shown}\n\n"


@pytest.mark.parametrize("template", ["{speed}", "{ratio/sampled:.2f}", "{n/deeper}", "{shares/2}", "{ratio/greedy:d}"])
def test_a_figure_that_the_result_does_not_have_is_refused(template: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="rules"):
        renewed(page(template), folder, lambda _: False)


def test_a_table_without_a_result_is_refused_with_how_to_mend_it(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no result of fleet: run `python -m benchmarks fleet`"):
        renewed(page("{n}", "fleet"), folder, lambda _: False)


@pytest.mark.parametrize("broken", ["<!-- results: rules -->", page("{n}").replace("<!-- end: results -->", "")])
def test_a_block_that_is_not_whole_is_refused(broken: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="no end, or no template"):
        renewed(broken, folder, lambda _: False)


def test_a_page_that_was_generated_stays_as_it_is(folder: Path) -> None:
    whole = renewed(page("{n}") + page("{shares:.1f}"), folder, lambda _: False)
    assert renewed(whole, folder, lambda _: None) == whole


def test_a_figure_that_was_changed_by_hand_and_a_newer_result_are_noticed(folder: Path) -> None:
    whole = renewed(page("{n} tokens"), folder, lambda _: False)
    assert renewed(whole.replace("3 tokens", "4 tokens"), folder, lambda _: None) == whole
    result(last={"n": 5}).write(folder)
    assert renewed(whole, folder, lambda _: None) != whole


def test_figures_of_earlier_code_are_marked_where_git_knows_and_stay_so_where_it_does_not(folder: Path) -> None:
    current, old = (renewed(page("{n}"), folder, lambda _, known=known: known) for known in (False, True))
    assert EARLIER not in current and old.count(EARLIER) == 1
    assert renewed(old, folder, lambda _: None) == old
    assert renewed(current, folder, lambda _: None) == current
    assert renewed(old, folder, lambda _: False) == current


def test_what_is_said_of_a_run_tells_all_that_is_known(folder: Path) -> None:
    zen = Machine(cpu="a CPU", cores=2)
    assert benchmark_tables.recorded(result(machine=zen, seconds=540)).endswith("on 2 cores of a CPU in 9 minutes.")
    assert benchmark_tables.recorded(result(seconds=41.6)).endswith("in 42 s.")
    assert "outside a checkout" in benchmark_tables.recorded(result(commit=None))
    assert benchmark_tables.recorded(result(status=1)).endswith("**A criterion does not hold.**")
    assert benchmark_tables.recorded(result(not_met=("a", "b"))).endswith("**Goals that were not met: 2.**")
    assert benchmark_tables.recorded(result(uncommitted=True)).endswith("**With changes that are not committed.**")
    taken = benchmark_tables.recorded(result(source="page", status=None))
    assert taken.startswith("Taken over from an earlier page: recorded 2026-01-02")


def test_a_block_of_several_runs_names_each_of_them_and_marks_those_of_earlier_code(folder: Path) -> None:
    result(name="fleet", commit=None, last={"n": 7}).write(folder)
    template = "{rules!shares:.1f}, {fleet!n} and {rules!ratio/greedy:.1f}"
    shown = renewed(page(template, "several"), folder, lambda found: found.name == "rules")
    known = "From `fleet` (2026-01-02), `rules` (2026-01-02 in 0123abcd, of earlier code)."
    assert f"-->\n{known}\n\n0.2 / 0.1, 7 and 1.2\n" in shown
    assert renewed(shown, folder, lambda _: None) == shown
    assert "earlier" not in renewed(shown, folder, lambda _: False)
    with pytest.raises(ValueError, match="no result of swarm"):
        renewed(page("{swarm!n}", "several"), folder, lambda _: False)


def test_a_stale_second_page_is_noticed_too(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = (folder / "one.md", folder / "two.md")
    for each in pages:
        each.write_text(page("{n}"))
    monkeypatch.setattr(benchmark_tables, "PAGES", pages)
    monkeypatch.setattr(results, "RESULTS", folder)
    run(monkeypatch)
    pages[1].write_text(page("{n}"))
    with pytest.raises(SystemExit):
        run(monkeypatch, "--check")
    told = capsys.readouterr().err
    assert "two.md is stale" in told and "one.md" not in told


def test_the_plot_of_capacity_is_drawn_with_the_pages(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    result(name="capacity", last={"tokens_per_s": {"device": {"1": 90.0, "4": 200.0}}}).write(folder)
    here = folder / "page.md"
    here.write_text(page("{n}"))
    monkeypatch.setattr(benchmark_tables, "PAGES", (here,))
    monkeypatch.setattr(benchmark_tables, "PLOT", folder / "capacity.png")
    monkeypatch.setattr(results, "RESULTS", folder)
    run(monkeypatch)
    assert (folder / "capacity.png").read_bytes().startswith(b"\x89PNG")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark_tables", *arguments])
    benchmark_tables.main()


def test_the_check_fails_for_a_stale_page_and_for_a_broken_result(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = folder / "page.md"
    here.write_text(page("{n}"))
    monkeypatch.setattr(benchmark_tables, "PAGES", (here,))
    monkeypatch.setattr(results, "RESULTS", folder)
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "--check")
    assert error.value.code == 1 and "run `python -m tools.benchmark_tables`" in capsys.readouterr().err
    run(monkeypatch)
    run(monkeypatch, "--check")
    (folder / "fleet.json").write_text("{}")
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "--check")
    assert error.value.code == 1 and "fleet.json is no result" in capsys.readouterr().err


def test_the_check_fails_for_a_missing_mark_where_git_can_tell(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    here = folder / "page.md"
    monkeypatch.setattr(benchmark_tables, "PAGES", (here,))
    monkeypatch.setattr(results, "RESULTS", folder)
    for known, fails in ((None, False), (False, False), (True, True)):
        here.write_text(renewed(page("{n}"), folder, lambda _: False))
        monkeypatch.setattr(results, "changed_since", lambda commit, paths, known=known: known)
        if fails:
            with pytest.raises(SystemExit):
                run(monkeypatch, "--check")
        else:
            run(monkeypatch, "--check")


def test_the_committed_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--check")
