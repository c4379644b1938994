"""Test that the tables of the operator's command align, show everything, and that no value steers a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from coordinator.cli.output import Column, Result, facts, number, render, rendered, stacked, table

NAMES = (Column("A", lambda row: row[0]), Column("LONG", lambda row: row[1]))


def test_columns_are_as_wide_as_the_widest_cell_and_lines_have_no_end_of_blanks() -> None:
    assert rendered(table(NAMES, [("xyz", "1"), ("", "2")])) == "A    LONG\nxyz  1\n     2"
    assert rendered(table(NAMES, [("東京", "1"), ("Zoë", "2")])).splitlines()[1:] == ["東京  1", "Zoë   2"]


def test_numbers_stand_below_one_another() -> None:
    columns = (number("SIZE", lambda row: row[0]), NAMES[1])
    assert rendered(table(columns, [("7", "x"), ("1234567", "y")])) == "   SIZE  LONG\n      7  x\n1234567  y"


def test_a_table_without_rows_is_its_head() -> None:
    assert rendered(table(NAMES, [])) == "A  LONG"


def test_a_value_that_holds_a_line_end_makes_no_line() -> None:
    assert rendered(table(NAMES, [("x\ny", "1")])).count("\n") == 1
    assert rendered(facts({"name": "x\ny", "n": "1"})) == "name  x\\x0ay\nn     1"


@pytest.mark.parametrize("form", [lambda text: text, lambda text: stacked(text, facts({"n": text}))])
def test_no_value_is_taken_for_a_style_a_code_or_a_link(form) -> None:
    said = rendered(form("[bold]x[/] :smile: \x1b[2J\u202ehttp://a/b"))
    assert said.splitlines()[0] == r"[bold]x[/] :smile: \x1b[2J\u202ehttp://a/b"
    assert "\x1b" not in said


def test_nothing_is_cut_off_whatever_its_length(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    reason = "because " * 200
    assert reason.strip() in rendered(table(NAMES, [("a" * 300, reason)]))
    assert reason.strip() in rendered(stacked("head", facts({"reason": reason})))


def test_sentences_and_tables_stand_apart() -> None:
    shown = rendered(stacked("head", table(NAMES, [("x", "1")]), "foot"))
    assert shown == "head\n\nA  LONG\nx  1\n\nfoot"


def test_a_narrow_terminal_goes_without_what_matters_least_and_without_what_is_empty() -> None:
    columns = (
        Column("ID", lambda row: row),
        Column("SPARE", lambda row: "12345", spare=1),
        Column("SPARER", lambda row: "12345", spare=2),
        Column("EMPTY", lambda row: ""),
    )
    assert rendered(table(columns, ["x"], width=40)).splitlines()[0] == "ID  SPARE  SPARER"
    assert rendered(table(columns, ["x"], width=18)).splitlines()[0] == "ID  SPARE"
    assert rendered(table(columns, ["x"], width=2)).splitlines()[0] == "ID"


def test_a_terminal_gets_a_bold_head_and_a_pipe_gets_none() -> None:
    program = (
        "from coordinator.cli.output import Column, rendered, table;"
        "print(rendered(table([Column('HEAD', str), Column('LAST', str)], [1])))"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, env=environment, timeout=30, check=True)
    os.close(theirs)
    head, row = os.read(ours, 4_096).decode().splitlines()
    os.close(ours)
    assert "\x1b[1m" in head and row == "1     1"
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert piped.stdout == "HEAD  LAST\n1     1\n"


@pytest.mark.parametrize(("form", "module"), [("table", "rich.table"), ("yaml", "yaml")])
def test_without_the_extra_json_goes_on_and_the_others_name_what_to_install(monkeypatch, form, module) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = Result({"a": 1}, lambda: table(NAMES, []))
    assert render(result, "json") == '{\n  "a": 1\n}'
    with pytest.raises(ImportError, match=r"pip install 'outrider\[coordinator\]', or use -o json"):
        render(result, form)
