"""Test what the operator's command prints: tables that align, values that steer no terminal, rates of `top`."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from coordinator.cli.output import Column, Result, facts, number, render, rendered, stacked, table
from coordinator.cli.top import Rates, frame

NAMES = (Column("A", lambda row: row[0]), Column("LONG", lambda row: row[1]))


def test_columns_are_as_wide_as_the_widest_cell_and_numbers_stand_below_one_another() -> None:
    assert rendered(table(NAMES, [("xyz", "1"), ("", "2")])) == "A    LONG\nxyz  1\n     2"
    assert rendered(table(NAMES, [("東京", "1"), ("Zoë", "2")])).splitlines()[1:] == ["東京  1", "Zoë   2"]
    columns = (number("SIZE", lambda row: row[0]), NAMES[1])
    assert rendered(table(columns, [("7", "x"), ("1234567", "y")])) == "   SIZE  LONG\n      7  x\n1234567  y"
    assert rendered(stacked("head", table(NAMES, []), "foot")) == "head\n\nA  LONG\n\nfoot"


@pytest.mark.parametrize("form", [lambda text: text, lambda text: stacked(text, facts({"n": text}))])
def test_no_value_is_taken_for_a_style_a_code_a_link_or_a_line(form) -> None:
    said = rendered(form("[bold]x[/] :smile: \x1b[2J\u202ehttp://a/b\n"))
    assert said.splitlines()[0] == r"[bold]x[/] :smile: \x1b[2J\u202ehttp://a/b\x0a"
    assert "\x1b" not in said


def test_nothing_is_cut_off_whatever_its_length(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    reason = "because " * 200
    assert reason.strip() in rendered(table(NAMES, [("a" * 300, reason)]))


def test_without_the_extra_json_goes_on_and_tables_name_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    result = Result({"a": 1}, lambda: table(NAMES, []))
    assert render(result, "json") == '{\n  "a": 1\n}'
    with pytest.raises(ImportError, match=r"pip install 'outrider\[coordinator\]', or use -o json"):
        render(result, "table")


# --- outrider top


def look(evaluated: int = 0, accepted: int = 0, committed: int = 0, epoch: int = 1) -> dict:
    verifier = {"id": "v1", "state": "serving", "sessions": 60, "capacity": 64, "tokens_per_s": 1234.5}
    verifier |= {"step_ms": 112.4, "min_acceptance": 0.02, "rtt_ms": 25.9, "kv_used": 3, "kv_capacity": 4}
    share = accepted / evaluated if evaluated else None
    verifier |= {"evaluated": evaluated, "accepted": accepted, "acceptance": share}
    session = {"id": "s", "epoch": epoch, "tenant": "acme", "verifier": "v1", "committed": committed}
    session |= {"acceptance": 0.4, "rtt_ms": 9.6}
    totals = {"total_verifiers": 3, "total_sessions": 1}
    where = {"coordinator": "127.0.0.1:7700", "uptime_s": 75.0, "store": "unix:///redis.sock"}
    return {"verifiers": [verifier], "sessions": [session], **totals, **where}


def test_rates_are_of_the_time_between_two_looks() -> None:
    rates = Rates()
    rates.add(seen := look(100, 40, 500), 10.0)
    assert (rates.acceptance(seen["verifiers"][0]), rates.tokens_per_s("s")) == (0.4, None)  # of its whole life
    rates.add(seen := look(200, 130, 560), 12.0)
    assert (rates.acceptance(seen["verifiers"][0]), rates.tokens_per_s("s")) == (0.9, 30.0)
    rates.add(seen := look(200, 130, 560), 13.0)
    assert rates.acceptance(seen["verifiers"][0]) == 0.9  # no node was evaluated since
    rates.add(look(50, 40, 100, epoch=2), 14.0)
    assert rates.tokens_per_s("s") is None  # it began again elsewhere


def test_a_frame_shows_verifiers_sessions_and_how_many_are_left_out() -> None:
    rates, out = Rates(), io.StringIO()
    for at in (1.0, 3.0):
        rates.add(seen := look(100, 48, int(100 * at)), at)
    Console(file=out, width=120).print(frame(seen, rates, 1, 1))
    cells = ("v1", "serving", "60/64", "1234", "48%", "0.02", "25.9 ms", "75%", "and 2 more verifiers", "acme", "100")
    assert [cell for cell in cells if cell not in out.getvalue()] == []
