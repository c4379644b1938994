"""Test that the plots of benchmarks.window are drawn from its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from outcomes import outcome

from benchmarks.window.cells import Cell, CellKey, figures
from benchmarks.window.plan import PACED

pytest.importorskip("matplotlib")


def test_there_is_a_picture_of_whatever_was_measured(tmp_path: Path) -> None:
    from benchmarks.window.plots import draw

    cell = figures(CellKey(PACED, "good", 50.0), Cell([[outcome(4.0)]], [[outcome(2.0)]]))
    line = {
        "name": "x",
        "adaptive": [(1.0, 20.0), (2.0, 30.0)],
        "streaming": [(1.0, 10.0), (2.0, 10.0)],
        "k": [(1.0, 4), (2.0, 8)],
        "depth": [(1.0, 8), (2.0, 12)],
        "changes": [(1.5, "to 300 ms")],
    }
    result = {
        "cells": [cell],
        "against": [{"rtt_ms": 50.0, "vs_streaming": 1.6, "predicted": 1.7}],
        "statics": [{"cell": "x", "over": {"streaming": 1.3, "k 4": 1.0}}],
        "series": [line],
        "curve": [(0.1, 0.12, 50), (0.9, 0.85, 50)],
    }
    made = draw(result, tmp_path)
    assert [path.name for path in made] == [
        f"window_{name}.png" for name in ("speedup", "bytes", "statics", "transition", "reliability")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    assert draw({"cells": []}, tmp_path) == []
