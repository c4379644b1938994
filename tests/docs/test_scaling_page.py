"""Test that docs/scaling.md computes what it shows from its unit costs, each of which names what has measured it."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import pytest
from pages import text_of

TEXT = text_of("docs/scaling.md")
COSTS = {name: float(value) for name, value in re.findall(r"^\| `(\w+)` \| ([\d.]+) ", TEXT, re.MULTILINE)}
SOURCES = dict(re.findall(r"^\| `(\w+)` \| [\d.]+ .*\| `benchmarks\.(\w+)`", TEXT, re.MULTILINE))
SIZES = (1_000, 10_000, 100_000, 1_000_000)
STEPS, SESSION_S, PLACES_TAKEN, RECORDED = 25.0, 120.0, 80, 0.01


def needs(devices: int) -> dict[str, float]:
    """Return what so many devices need, by the label of the table's row."""
    c = COSTS
    opens, reports, verifiers = devices / SESSION_S, devices / 100, math.ceil(devices / PLACES_TAKEN)
    tokens = STEPS * devices / c["commits"]
    return {
        "sessions opened a second": opens,
        "tokens a second": tokens,
        "verifiers of 100 places": verifiers,
        "fronts: cores": STEPS * devices * c["front"] / 1e6,
        "coordinators: cores, to decide about windows": devices * c["decide"] / 1e3,
        "coordinators: cores, for reports": reports * c["report"] / 1e6,
        "coordinators: cores, for opened and closed sessions": opens * (c["open"] + c["close"]) / 1e6,
        "each coordinator: cores, to read all verifiers": verifiers * c["fleet"] / 1e6,
        "Redis: cores, for reports": reports * c["redis_report"] / 1e6,
        "Redis: cores, for opened and closed sessions": opens * (c["redis_open"] + c["redis_close"]) / 1e6,
        "Redis: cores, for each coordinator that reads all verifiers": verifiers * c["redis_fleet"] / 1e6,
        "Redis: commands a second": reports * c["commands_report"] + opens * (c["commands_open"] + c["commands_close"]),
        "Redis: memory, GB": (devices * c["redis_session"] + 7_200 * opens * c["redis_closed"]) / 1e9,
        "from devices, Mbit/s": 8 * tokens * c["up"] / 1e6,
        "to devices, Mbit/s": 8 * tokens * c["down"] / 1e6,
        "traffic log a day, GB": 86_400 * RECORDED * tokens * c["log"] / 1e9,
    }


def shown(value: float) -> str:
    """Return a figure as the page has it: with two significant digits, and all of those of a count."""
    if isinstance(value, int):
        return f"{value:,}"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"


@pytest.mark.parametrize("label", needs(1_000))
def test_a_row_of_the_table_is_computed_from_the_unit_costs(label: str) -> None:
    [row] = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", TEXT, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")] == [shown(needs(size)[label]) for size in SIZES]


def test_every_unit_cost_is_used_and_measured_by_a_benchmark_that_there_is() -> None:
    assert SOURCES.keys() == COSTS.keys()
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in SOURCES.values())
    used = set(re.findall(r'c\["(\w+)"\]', Path(__file__).read_text()))
    assert used == COSTS.keys()
