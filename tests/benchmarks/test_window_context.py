"""Test how the parts of benchmarks.window play their verifiers."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from benchmarks.support.harness import Pair
from benchmarks.window.context import RunContext
from benchmarks.window.plan import PACED, PACEDS, QUICK, REAL
from benchmarks.window.recording_library import RecordingLibrary
from benchmarks.window.testbed import CorePair, VerifierMachine, WindowTestbed

PAIR = Pair(Path("target"), Path("draft.gguf"), Path("narrow.gguf"))


def context(scratch: Path, *, together: bool = True) -> RunContext:
    core_pairs = (CorePair(0, 1), CorePair(1, 0))
    return RunContext(WindowTestbed(PAIR), QUICK, RecordingLibrary(PAIR, QUICK, {}, {}, scratch), core_pairs, together)


@pytest.mark.parametrize(
    ("machines", "allowed", "most"),
    [
        ([PACED, PACED], True, 2),
        ([PACED, PACED], False, 1),
        ([REAL, PACED], True, 1),
        ([PACEDS, PACEDS], True, 1),
    ],
)
async def test_two_are_played_at_once_where_both_are_paced_for_one_session(
    tmp_path: Path, machines: list[VerifierMachine], allowed: bool, most: int
) -> None:
    playing = seen = 0

    async def one(number: int) -> int:
        nonlocal playing, seen
        playing += 1
        seen = max(seen, playing)
        await asyncio.sleep(0)
        playing -= 1
        return number

    found = await context(tmp_path, together=allowed).each([partial(one, 1), partial(one, 2)], machines)
    assert (found, seen) == ([1, 2], most)
