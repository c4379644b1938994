"""Test the arithmetic of benchmarks whose figures could be wrong without anybody noticing."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import window
from benchmarks.__main__ import NAMES, docstring
from benchmarks.page import QUESTIONS, draw_speedups, page
from benchmarks.support import harness
from benchmarks.support.fleet import CAUGHT, ENDLESS, KINDS, LENGTHS, Session, Verifier, per_step
from benchmarks.support.harness import Pair
from benchmarks.support.network_proxy import DelayProxy, Link
from benchmarks.support.target_reference import Reference
from edge_agent.bench.users import Run, Text, degenerates, differing
from outrider.core.addresses import split_address
from outrider.core.coupling import position_key, session_key
from outrider.core.errors import BadRequest
from outrider.core.sampling import SamplingParams
from outrider.core.target_token import reference_token


def text(user: int, prompt: int, delivered: tuple[float, ...], tokens: str = "", **fields: object) -> Text:
    ids = tuple(map(ord, tokens or "x" * len(delivered)))
    one = Text(user, prompt, ids, delivered[0] - 1.0, delivered, steps=len({*delivered}), evaluated=0, accepted=0)
    return replace(one, **fields)


def test_a_texts_rate_counts_what_came_after_its_first_message() -> None:
    assert text(0, 0, (1.0, 1.0, 2.0, 3.0)).rate == 1.0
    assert text(0, 0, (1.0, 1.0)).rate == 0.0


def test_the_rate_of_all_users_is_taken_while_all_of_them_run() -> None:
    early = text(0, 0, tuple(float(second) for second in range(11)))
    late = text(1, 1, tuple(5.0 + second / 2 for second in range(21)))
    # From 5 s, when the second user begins, to 10 s, when the first one ends: 5 tokens and 10.
    assert Run((early, late), busy=0.0).tokens_per_s == 3.0


def test_acceptance_length_is_tokens_by_steps_and_not_a_mean_of_ratios() -> None:
    run = Run((text(0, 0, (1.0, 1.0, 1.0)), text(0, 1, (1.0, 2.0, 3.0))), busy=0.0)
    assert run.acceptance_length == 6 / 4


@pytest.mark.parametrize(("tokens", "whole", "count"), [("abc", True, 0), ("ab", False, 0), ("abd", True, 1)])
def test_a_text_differs_where_it_says_something_else_and_not_where_it_was_cut(
    tokens: str, whole: bool, count: int
) -> None:
    reference = text(0, 7, (1.0, 2.0, 3.0), "abc")
    delivered = tuple(float(number) for number in range(len(tokens)))
    assert differing([text(1, 7, delivered, tokens, whole=whole)], [reference]) == count


def test_rounds_cost_a_round_trip_each_and_their_drafting_nothing(tmp_path: Path) -> None:
    runs = {arm: Run((text(0, 0, (1.0, 1.5, 2.0)),), busy=0.0) for arm in ("none", "adaptive", "verifier", "both")}
    shown = [window.row(rtt_ms, runs, in_rounds=1.8) for rtt_ms in (0.0, 250.0)]
    assert [one["rounds"] for one in shown] == [1.8, 1.2], "a step takes 500 ms"
    draw_speedups({"table": shown}, tmp_path / "picture.svg")
    assert "in rounds (calculated)" in (tmp_path / "picture.svg").read_text()


def test_a_text_that_ends_in_a_loop_is_found_and_one_that_repeats_a_phrase_is_not() -> None:
    words = [*range(200)]
    assert degenerates([*words[:60], *([*words[:9], 7, 7] * 6)])
    assert degenerates([*words[:20], *([*words[30:39]] * 5)][:64]), "an answer of 64 tokens"
    assert degenerates([5] * 40)
    assert not degenerates(words)
    assert not degenerates([*words[:50], *words[10:30], *words[100:150]])
    assert not degenerates([5] * 18), "too short to tell"


def test_a_prompt_that_is_too_long_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Pair, "encode", lambda _, text: [0] * len(text))
    rows = [{"id": str(size), "category": f"of {size % 2}", "turns": ["x" * size, "y"]} for size in (10, 30, 12, 11)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = argparse.Namespace(prompts=tmp_path / "p.jsonl", quick=False, measured={})
    pair = Pair(tmp_path, tmp_path)
    assert list(harness.prompts(options, pair, 2, most=20)) == ["10", "11"]
    assert list(harness.prompts(options, pair, most=20, category="of 0")) == ["10", "12"]
    assert options.measured["prompts"] == {"file": "p.jsonl", "asked": 4, "too_long": 1}
    with pytest.raises(BadRequest, match=r"p\.jsonl has 0 prompts of at most 9 tokens, must have 1"):
        harness.prompts(options, pair, 1, most=9)


def test_the_reference_notices_a_wrong_token_and_an_output_that_ends_early() -> None:
    reference = Reference.__new__(Reference)
    logits = torch.tensor([[[0.0, 0.0, 9.0, 1.0], [0.0, 7.0, 3.0, 0.0], [5.0, 0.0, 0.0, 4.5]]])
    reference._model = lambda input_ids, logits_to_keep: SimpleNamespace(
        logits=torch.cat([logits[:, : logits_to_keep - 1], logits[:, :1]], dim=1)
    )
    reference._ends, reference._tie = {0}, 1e-3
    assert reference.gaps([1], [2, 1, 0], {}, tokens=8) == []
    assert reference.gaps([1], [2, 2, 0], {}, tokens=8) == [4.0]
    assert reference.gaps([1], [2, 1], {}, tokens=8) == [math.inf]
    # With top_p 0.5 the first row leaves one token alone.
    assert reference.gaps([1], [3], {"temperature": 1.0, "top_p": 0.5}, tokens=1) == [math.inf]
    # At temperature 1 the noise of docs/protocol.md decides, as in the product.
    row = logits[0, 2].numpy()
    expected = [reference_token(row, SamplingParams(temperature=1.0, seed=s), _key(s)) for s in range(40)]
    chosen = [token for s in range(40) for token in range(4) if not _gaps(reference, row, s, token)]
    assert chosen == expected and len({*chosen}) > 1


def _key(seed: int) -> int:
    return position_key(session_key(seed, [1]), 0)


def _gaps(reference: Reference, row: np.ndarray, seed: int, token: int) -> list[float]:
    reference._model = lambda input_ids, logits_to_keep: SimpleNamespace(
        logits=torch.tensor(row)[None, None].expand(1, logits_to_keep, 4)
    )
    return reference.gaps([1], [token], {"temperature": 1.0, "seed": seed}, tokens=1)


def speed(kind: str, length: int, rtt: float = 0.0, draft: float = 0.0) -> tuple[float, float]:
    """Return (tokens, draft tokens) of steps that take a second."""
    one = Session(kind, rtt, draft, b"")
    tokens, drafted = per_step([one], np.array([length]), np.array([ENDLESS]), np.ones(1))
    return float(tokens[0]), float(drafted[0])


def test_a_simulated_session_without_speculation_gets_one_token_a_step() -> None:
    assert speed("code", 0) == pytest.approx((1.0, 0.0))
    assert speed("code", 4, draft=1.5) == pytest.approx((1.0, 0.0)), "a device slower than the target adds nothing"


def test_simulated_acceptances_give_the_geometric_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "even", (0.6, 0.6))
    # The chain's tokens, the target's own, and a sibling where the chain is broken within the length.
    chain = 0.6 + 0.6**2 + 0.6**3
    assert speed("even", 3)[0] == pytest.approx(1.0 + chain + CAUGHT * (1 - 0.6**3), rel=1e-4)
    assert speed("even", 3, rtt=0.5, draft=0.01)[0] < speed("even", 3)[0]


def test_no_choice_of_lengths_exceeds_the_bound() -> None:
    rng = random.Random(3)
    verifier = Verifier.drawn(rng, 6)
    bound, undrafted = verifier.bound(), verifier.undrafted
    fair = 0
    for _ in range(60):
        speeds = verifier.speeds(np.array([rng.choice(LENGTHS[:8]) for _ in range(6)]), np.full(6, ENDLESS))
        if (speeds >= 0.98 * undrafted).all():
            fair += 1
            assert speeds.sum() <= 1.001 * bound
    assert fair > 10
    assert bound > undrafted.sum()


async def test_a_link_delays_each_way_and_holds_a_slow_line_to_its_bandwidth() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, DelayProxy(target, link=Link(rtt_ms=40.0)) as proxy:
        reader, writer = await asyncio.open_connection(*split_address(proxy.address))

        async def round_trip_s(size: int) -> float:
            begun = time.monotonic()
            writer.write(bytes(size))
            await reader.readexactly(size)
            return time.monotonic() - begun

        assert await round_trip_s(1) >= 0.04
        proxy.link = Link(rtt_ms=0.0, up_bps=400_000.0)
        assert await round_trip_s(5_000) >= 0.1
        proxy.blackhole()
        writer.write(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.05)
        proxy.lift()
        assert await reader.readexactly(1) == b"x"
        writer.close()


def test_a_page_of_full_results_has_at_most_200_lines_and_each_tables_first_and_last_rows() -> None:
    machine = {"cores": 2, "cpu": "x"}
    common = {"setting": "Greedy.", "date": "2026-01-01", "commit": "abc", "machine": machine, "details": {"a": 1}}
    results = {name: dict(common) for name in NAMES}
    tables = [one for several in QUESTIONS.values() for one in several]
    more = {"drafts": "devices", "nobody": "x", "tokens_per_s": "x"}
    for one in tables:
        results[one.benchmark][one.rows] = [
            more | {key: f"{one.benchmark} {key} {i}" for key in one.columns.split()} for i in range(40)
        ]
    lines = page({name: docstring(name) for name in NAMES}, results).splitlines()
    assert {one.benchmark for one in tables} == {*NAMES} and len(NAMES) == 10
    assert len(lines) <= 200
    for one in tables:
        if one.benchmark != "capacity":
            rows = {f"| {' | '.join(f'{one.benchmark} {key} {i}' for key in one.columns.split())} |" for i in (0, 39)}
            assert rows <= {*lines}


def test_the_page_has_a_row_for_each_number_of_users_and_a_column_for_each_who_drafts() -> None:
    rows = [
        {"users": users, "drafts": who, "nobody": 1000.5, "tokens_per_s": users * factor}
        for users in (1, 4)
        for who, factor in (("devices", 20), ("both", 30))
    ]
    result = {"table": rows, "setting": "", "date": "", "commit": "", "machine": {"cores": 2, "cpu": "x"}}
    lines = page({name: docstring(name) for name in NAMES}, {"capacity": result}).splitlines()
    [head] = [i for i, line in enumerate(lines) if line.startswith("| users |")]
    assert lines[head + 2 : head + 4] == ["| 1 | 1,000.5 | 20 | 30 |", "| 4 | 1,000.5 | 80 | 120 |"]
