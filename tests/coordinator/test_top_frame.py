"""Test a frame of `outrider top` in terminals of several widths."""

import io

import pytest
from rich.console import Console

from coordinator.cli.top import BAR, HISTORY, Rates, bar, frame

VERIFIER = {
    "id": "verifier-1",
    "state": "serving",
    "sessions": 60,
    "capacity": 64,
    "tokens_per_s": 1234.5,
    "step_ms": 112.4,
    "min_acceptance": 0.02,
    "evaluated": 100,
    "accepted": 48,
    "acceptance": 0.48,
    "rtt_ms": 25.9,
    "kv_used": 30_000,
    "kv_capacity": 32_768,
}
SESSION = {
    "id": "aa4439d5aba964a3b6c9497bd3b120df",
    "epoch": 1,
    "tenant": "default",
    "verifier": "verifier-1",
    "committed": 565,
    "tokens_per_step": 2.21,
    "acceptance": 0.4,
    "rtt_ms": 9.6,
    "traffic_class": "code",
}
STATUS = {
    "coordinator": "127.0.0.1:7700",
    "uptime_s": 75.0,
    "store": "unix:///tmp/a-folder-with-a-long-name/redis.sock",
    "verifiers": [VERIFIER],
    "total_verifiers": 1,
    "sessions": [SESSION],
    "total_sessions": 1,
}


def lines(width: int, looks: int = HISTORY) -> list[str]:
    rates = Rates()
    for at in range(looks):
        rates.add(STATUS, 1.0 + at)
    out = io.StringIO()
    Console(file=out, width=width).print(frame(STATUS, rates, 5, 5, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 132, 200])
def test_no_number_is_cut_short(width):
    shown = lines(width)
    assert max(map(len, shown)) <= width
    assert not any("…" in line for line in shown[1:])  # the first names the store, which may be long
    for cell in ("verifier-1", "serving", "60/64", "0.02", "48%", "25.9 ms", SESSION["id"], "40%", "9.6 ms"):
        assert any(cell in line for line in shown), cell


def test_a_wide_terminal_shows_everything():
    shown = "\n".join(lines(140))
    for name in ("LOAD", "LATELY", "STEP", "KV", " 92%", "TENANT", "COMMITTED", "TOKENS/STEP", "CLASS", "█"):
        assert name in shown


def test_a_narrow_terminal_goes_without_what_matters_least():
    shown = "\n".join(lines(80))
    assert "CLASS" not in shown and "LOAD" not in shown
    assert "ACCEPTED" in shown and "RTT" in shown and "MIN ACC" in shown


@pytest.mark.parametrize(("used", "blocks"), [(0, 0), (1, 1), (500, 5), (1000, BAR), (2000, BAR)])
def test_a_bar_is_empty_only_where_nothing_is_used(used, blocks):
    assert bar(used, 1000).plain.count("█") == blocks and len(bar(used, 1000).plain) == BAR


def test_one_look_has_no_history_to_show():
    assert "LATELY" not in "\n".join(lines(140, looks=0))
