"""Test the engine benchmark's accounting: the parts of a step, the useful tokens, and the quality of trees."""

from __future__ import annotations

import math
import os
import time
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tiny_targets import VOCAB, make_tiny
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.engine import Case, autoregression, cases, continued, steps
from benchmarks.support import engine_options, hf_baseline, vllm_baseline
from benchmarks.support.engine_driver.engine_step_trace import PartTimer, TracedEngine, TracedStep
from benchmarks.support.engine_driver.scripted_trees import TreeTally, offer
from benchmarks.support.hf_baseline import GenerateRequest, HuggingFaceBaseline, TimedOutput
from benchmarks.support.reference import TIE
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.errors import Unavailable


class Ticks:
    """Advance by one second at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> TargetModel:
    target = TargetModel(make_tiny("qwen3"), name="tiny")
    check_numerics(target)
    return target


@pytest.fixture
def bench(model: TargetModel) -> TracedEngine:
    return TracedEngine(model, EngineConfig(kv_slots=4096, max_sessions=16))


def texts(count: int, length: int) -> list[list[int]]:
    return [Random(i).choices(range(VOCAB), k=length) for i in range(count)]


def test_parts_within_parts_sum_to_the_time_from_the_first_to_the_last_look_at_the_clock() -> None:
    clock = Ticks()
    parts = PartTimer(clock)
    inner = parts.timed("inner", lambda: "result")
    outer = parts.timed("outer", lambda: (inner(), inner()))
    parts.enter("loop")
    assert outer() == ("result", "result")
    parts.leave()
    taken = parts.take()
    assert taken == {"loop": 2.0, "outer": 3.0, "inner": 2.0}
    assert sum(taken.values()) == clock.now - 1.0
    assert parts.take() == {}


def test_a_part_that_fails_is_left_all_the_same() -> None:
    parts = PartTimer(Ticks())
    parts.enter("loop")
    with pytest.raises(ZeroDivisionError):
        parts.timed("inner", lambda: 1 / 0)()
    parts.leave()
    assert parts.take() == {"loop": 2.0, "inner": 1.0}


def test_the_share_outside_is_all_but_the_forward() -> None:
    assert TracedStep({"forward": 6.0, "verify": 1.0, "decode": 0.5, "loop": 0.5}, ()).outside == pytest.approx(0.25)


def test_every_step_decodes_and_encodes_for_every_session_and_its_parts_are_all_there(model: TargetModel) -> None:
    clock = Ticks()
    bench = TracedEngine(model, EngineConfig(kv_slots=4096, max_sessions=16), PartTimer(clock))
    sessions = continued(bench, [Case(tuple(text)) for text in texts(3, 20)], 40)
    before = clock.now
    turns = steps(bench, sessions, 4, 3, 0, TreeTally())
    assert len(turns) == 3
    for turn in turns:
        assert {"decode", "protocol", "schedule", "prepare", "pack", "attention plan", "forward"} <= set(turn.parts)
        assert {"verify", "commit", "encode", "loop"} <= set(turn.parts)
        assert turn.parts["decode"] >= 2 * 3  # a frame and its Append for each session
        assert turn.parts["encode"] >= 3 + 1  # each Commit, and the bytes
        assert [commit.evaluated for commit in turn.commits] == [4, 4, 4]
    assert sum(turn.seconds for turn in turns) < clock.now - before


def test_the_model_is_left_as_it_was(bench: TracedEngine, model: TargetModel) -> None:
    continued(bench, [Case((5, 6, 7))], 4)
    assert "forward" not in vars(model)
    assert "plan" not in vars(model.attention)
    assert "_verify" not in vars(bench.engine)


@pytest.mark.parametrize("nodes", [1, 4, 8, 16])
def test_a_tree_has_its_nodes_in_order_distinct_siblings_and_just_the_right_path_that_it_says(nodes: int) -> None:
    rng = Random(nodes)
    for _ in range(200):
        future = [rng.randrange(VOCAB) for _ in range(rng.randrange(20))]
        tree = offer(future, nodes, 0.7, VOCAB, rng)
        assert len(tree.tokens) == len(tree.parents) == nodes
        assert all(parent <= row for row, parent in enumerate(tree.parents))
        children = {pair: i + 1 for i, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        assert len(children) == nodes
        row = verified = 0
        while verified < len(future) and (row, future[verified]) in children:
            row, verified = children[row, future[verified]], verified + 1
        assert verified == tree.right


def test_trees_are_right_at_each_depth_as_often_as_asked() -> None:
    rng = Random(1)
    offers = [offer(range(50), 8, 0.6, VOCAB, rng) for _ in range(3_000)]
    tries = sum(min(tree.right + 1, tree.spine) for tree in offers)
    assert sum(tree.right for tree in offers) / tries == pytest.approx(0.6, abs=0.02)
    assert {offer(range(50), 8, 1.0, VOCAB, rng).right, offer(range(50), 8, 0.0, VOCAB, rng).right} == {6, 0}


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 1.0])
def test_the_engine_accepts_what_the_trees_were_made_to_have_accepted(bench: TracedEngine, rate: float) -> None:
    greedy, mixed = cases(bench, texts(6, 20), 160)
    tally = TreeTally()
    steps(bench, mixed, 8, 20, 3, tally, rate)
    assert tally.steps >= 6 * 20
    assert tally.accepted == tally.planned
    assert tally.rate == pytest.approx(rate, abs=0.1 if 0 < rate < 1 else 0.0)
    assert greedy[3:] == mixed[3:]
    assert [case.sampling.temperature for case in mixed] == [0.8, 0.8, 0.8, 0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def hf() -> HuggingFaceBaseline:
    return HuggingFaceBaseline(make_tiny("qwen3"), make_tiny("llama"))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_engine_and_hugging_face_answer_ragged_requests_alike_and_only_useful_tokens_count(
    bench: TracedEngine, hf: HuggingFaceBaseline, static: bool
) -> None:
    asked = hf_baseline.ragged(texts(4, 40), 24)
    assert len({request.tokens for request in asked}) == 4
    ours, theirs = autoregression(bench, asked, "x"), hf.batch(asked, static=static)
    assert ours.outputs == theirs.outputs
    assert ours.tokens == theirs.tokens == sum(request.tokens for request in asked) < 4 * 24
    assert theirs.rate == pytest.approx(theirs.tokens / theirs.seconds)


def test_decoding_alone_is_less_than_the_whole_and_leaves_the_first_tokens_out(
    bench: TracedEngine, hf: HuggingFaceBaseline
) -> None:
    asked = [GenerateRequest(tuple(text), 24) for text in texts(4, 40)]
    theirs = hf.batch(asked, static=False)
    assert theirs.decode_tokens == 4 * 23
    assert 0 < theirs.decode_seconds < theirs.seconds
    ours = autoregression(bench, asked, "y")
    assert 4 * 16 <= ours.decode_tokens <= 4 * 23
    assert 0 < ours.decode_seconds < ours.seconds


def test_assisted_generation_gives_the_targets_own_tokens(hf: HuggingFaceBaseline) -> None:
    asked = GenerateRequest(tuple(texts(1, 30)[0]), 20)
    assert hf.assisted(asked).outputs == hf.batch([asked], static=False).outputs


def test_a_prompt_under_another_salt_is_read_anew(bench: TracedEngine) -> None:
    asked = [GenerateRequest(tuple(texts(1, 40)[0]), 4)]
    for salt in ("one", "two"):
        autoregression(bench, asked, salt)
    assert bench.engine.counters.prefix_hits == 0
    autoregression(bench, asked, "two")
    assert bench.engine.counters.prefix_hits == 1


def test_decoding_in_vllm_begins_after_the_last_first_token_and_ends_with_the_first_request() -> None:
    asked = [GenerateRequest((1, 2), 2), GenerateRequest((3,), 4)]
    tokens = [{"0": [5]}, {"1": [6]}, {"0": [7], "1": [8]}, {"1": [9]}, {"1": [10]}]
    steps = [{"cpu": 1.0, "wall": 2.0, "tokens": got} for got in tokens]
    timed = vllm_baseline.timed_output(asked, steps)
    assert timed.outputs == ((5, 7), (6, 8, 9, 10))
    assert (timed.seconds, timed.wall_seconds) == (5.0, 10.0)
    assert (timed.decode_tokens, timed.decode_seconds, timed.decode_wall_seconds) == (2, 1.0, 2.0)
    assert timed.by_wall.rate == pytest.approx(timed.rate / 2)


def test_the_wall_time_of_the_engine_is_that_of_its_steps(bench: TracedEngine) -> None:
    began = time.perf_counter()
    ours = autoregression(bench, [GenerateRequest(tuple(text), 24) for text in texts(2, 40)], "wall")
    assert 0 < ours.decode_wall_seconds < ours.wall_seconds < time.perf_counter() - began


def test_an_output_is_judged_by_the_logits_where_it_leaves_the_engines(hf: HuggingFaceBaseline) -> None:
    asked = GenerateRequest(tuple(texts(1, 30)[0]), 12)
    ours = hf.batch([asked], static=False)
    (own,) = ours.outputs
    assert hf_baseline.gaps(hf, [asked], ours, ours) == []
    assert hf.gap((*asked.prompt, *own[:5]), (own[5],)) == pytest.approx(0.0, abs=1e-4)
    other = replace(ours, outputs=((*own[:5], (own[5] + 1) % VOCAB, *own[6:]),))
    (gap,) = hf_baseline.gaps(hf, [asked], ours, other)
    assert gap > TIE
    assert hf_baseline.gaps(hf, [asked], ours, replace(ours, outputs=(own[:5],))) == [math.inf]


def test_vllm_is_compared_only_where_an_interpreter_with_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*arguments: str) -> Path | None:
        parser = ArgumentParser()
        engine_options.add_python(parser, "--vllm-python")
        found: Path | None = parser.parse_args(arguments).vllm_python
        return found

    monkeypatch.delenv(engine_options.PYTHON, raising=False)
    assert named() is None
    monkeypatch.setenv(engine_options.PYTHON, "/one/bin/python")
    assert named() == Path("/one/bin/python")
    assert named("--vllm-python", "/other/bin/python") == Path("/other/bin/python")


def test_an_interpreter_without_vllm_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no module >&2; exit 1\n")
    python.chmod(0o755)
    running = vllm_baseline.running(python, tmp_path, min(os.sched_getaffinity(0)), {vllm_baseline.EAGER: {}})
    with pytest.raises(Unavailable, match="vllm_worker ended before it was ready"), running:
        pass


def test_the_best_peer_of_each_round_is_the_measure() -> None:
    def timed(rate: float) -> TimedOutput:
        return TimedOutput(((0,) * 10,), 10 / rate, 0, 0.0)

    found = {"engine": [timed(9), timed(8)], "a": [timed(10), timed(2)], "b": [timed(5), timed(16)]}
    assert hf_baseline.over_best(found) == pytest.approx((0.9 + 0.5) / 2)


def test_a_draft_read_from_gguf_says_what_it_said_before(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from cloud_verifier.distill.gguf.writer import write_gguf

    module = make_tiny("qwen3")
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    letters = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    letters.pre_tokenizer = ByteLevel(add_prefix_space=False)
    write_gguf(module, PreTrainedTokenizerFast(tokenizer_object=letters), tmp_path / "draft.gguf", "tiny")
    read = hf_baseline.draft_from_gguf(tmp_path / "draft.gguf")
    ids = torch.tensor(texts(1, 12))
    with torch.inference_mode():
        assert torch.allclose(read(ids).logits, module(ids).logits, atol=1e-4)
