"""Test how the parts of benchmarks.window play their verifiers."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import pytest

from benchmarks.support.draft_replay.client import ServiceAddress
from benchmarks.support.draft_replay.recording import RecordedRequest
from benchmarks.support.harness import Pair
from benchmarks.window import recording_library
from benchmarks.window.context import RunContext
from benchmarks.window.plan import CHANGING, PACED, PACEDS, QUICK, REAL
from benchmarks.window.recording_library import RecordingLibrary
from benchmarks.window.testbed import CorePair, VerifierMachine, WindowTestbed
from outrider.core.errors import BadRequest
from outrider.core.sampling import SamplingParams

PAIR = Pair(Path("target"), Path("draft.gguf"), Path("narrow.gguf"))


def context(scratch: Path, *, together: bool = True) -> RunContext:
    core_pairs = (CorePair(0, 1), CorePair(1, 0))
    return RunContext(WindowTestbed(PAIR), QUICK, RecordingLibrary(PAIR, QUICK, {}, {}, scratch), core_pairs, together)


@pytest.mark.parametrize(
    ("machines", "allowed", "most"),
    [
        ([CHANGING, CHANGING], True, 2),
        ([CHANGING, CHANGING], False, 1),
        ([PACED, PACED], True, 1),
        ([REAL, CHANGING], True, 1),
        ([PACEDS, PACEDS], True, 1),
    ],
)
async def test_two_are_played_at_once_where_both_have_one_session_and_sleep_most_of_the_time(
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


@pytest.mark.parametrize(
    ("outputs", "played"),
    [
        ({0.0: [1, 2, 3, 4] * 20, 0.8: [*range(80)]}, {tuple(range(80))}),
        ({0.0: [1, 2, 3, 4] * 20, 0.8: [5, 6, 7, 8] * 20}, set()),
    ],
)
async def test_texts_that_repeat_themselves_are_no_example_of_a_good_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: dict[float, list[int]], played: set[tuple[int, ...]]
) -> None:
    recorded: list[RecordedRequest] = []

    async def calls(
        where: object, prompts: object, asked: dict[str, float], at_once: int
    ) -> tuple[list[RecordedRequest], tuple[int, ...]]:
        sampling = SamplingParams(temperature=asked["temperature"])
        return [RecordedRequest("p", (1,), sampling, 80, tuple(outputs[asked["temperature"]]), True)], ()

    async def record(self: object, name: str, draft: str, requests: list[RecordedRequest], ends: object) -> None:
        recorded.extend(requests)

    library = RecordingLibrary(PAIR, QUICK, {"p": [1]}, {}, tmp_path)
    library._lessons["good"] = ()
    monkeypatch.setattr(recording_library, "calls", calls)
    monkeypatch.setattr(recording_library, "match_rates", lambda pair, requests, ends, lessons: [0.8] * len(requests))
    monkeypatch.setattr(RecordingLibrary, "_record", record)
    with contextlib.nullcontext() if played else pytest.raises(BadRequest, match="repeat themselves"):
        await library._near(ServiceAddress("nowhere:1"))
    assert {each.output for each in recorded} == played
    assert library.near == ({"texts": 1, "greedy": 0, "match": 0.8, "least": 0.8, "most": 0.8} if played else None)
