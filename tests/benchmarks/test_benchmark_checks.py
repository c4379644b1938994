"""Test that each of the benchmarks' own checks can fail."""

from __future__ import annotations

import ast
import asyncio
import json
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import failover
from benchmarks.chaos.findings import criteria as chaos_criteria
from benchmarks.failover import KILL, STOP, FailoverTrial, TrialResult
from benchmarks.support import engine_equality, harness, texts
from benchmarks.support.engine_equality import Answer, Call, Comparison, calls
from benchmarks.support.harness import Size
from benchmarks.support.reference import Reference, ReferenceSampling, TokenDifference
from benchmarks.support.stream_sniffer import FailoverTrace, StaleCommits, StreamSniffer
from edge_agent.session.failover import AttachTarget

VOCAB, END = 97, 5
PROMPT = [11, 3, 42, 8]
SAMPLED = ReferenceSampling(
    temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, seed=7
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
    )
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    folder = tmp_path_factory.mktemp("target")
    module.save_pretrained(folder)
    return Reference(str(folder))


def right(reference: Reference, settings: ReferenceSampling, length: int) -> list[int]:
    """Return the tokens that the reference expects, one by one."""
    output: list[int] = []
    while len(output) < length:
        probe = reference.differences(PROMPT, [*output, 0], settings, len(output) + 1)
        wrong = [difference for difference in probe if difference.position == len(output) and difference.got == 0]
        output.append(wrong[0].expected if wrong else 0)
        assert output[-1] != END, "choose another seed: this text ends early"
    return output


@pytest.mark.parametrize("settings", [ReferenceSampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_reference_accepts_its_own_text_and_nothing_else(reference: Reference, settings: ReferenceSampling) -> None:
    output = right(reference, settings, 24)
    assert reference.differences(PROMPT, output, settings, 24) == []

    corrupted = [*output]
    corrupted[9] = (corrupted[9] + 1) % VOCAB
    found = reference.differences(PROMPT, corrupted, settings, 24)
    assert found[0].position == 9
    assert found[0].expected == output[9]
    assert not found[0].tie

    assert not all(d.tie for d in reference.differences(PROMPT, output[:20], settings, 24)), "cut short"
    assert not all(d.tie for d in reference.differences(PROMPT, [*output, output[-1]], settings, 24)), "too long"
    through_the_end = [*output[:8], END, *output[8:15]]
    assert not all(d.tie for d in reference.differences(PROMPT, through_the_end, settings, 16))


def test_a_gap_is_that_of_the_worse_token_from_the_best(reference: Reference) -> None:
    output = right(reference, ReferenceSampling(), 6)
    corrupted = [*output[:-1], (output[-1] + 1) % VOCAB]
    (difference,) = reference.differences(PROMPT, corrupted, ReferenceSampling(), 6)
    before = output[:-1]
    assert reference.gap(PROMPT, before, ReferenceSampling(), output[-1:]) == pytest.approx(0.0, abs=1e-5)
    found = reference.gap(PROMPT, before, ReferenceSampling(), [output[-1], corrupted[-1]])
    assert found == pytest.approx(difference.gap, abs=1e-4)


def test_an_output_of_another_engine_is_equal_a_tie_or_a_mismatch(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = right(reference, ReferenceSampling(), 12)
    call = Call(0, "p", tuple(PROMPT), "greedy")
    other = [*output[:7], (output[7] + 1) % VOCAB, *output[8:]]
    outputs = [
        (call, Answer(tuple(output), 12, 1, False), Answer(tuple(got), 12, 1, False))
        for got in (output, other, output[:9])
    ]
    assert Comparison(reference, "x").of(outputs) == {"equal": 1, "ties": [], "mismatches": 2}

    monkeypatch.setattr(
        engine_equality, "TIE", 1e3
    )  # a token that rounding may choose as well; no end that comes early
    found = Comparison(reference, "x").of(outputs)
    assert (found["equal"], len(found["ties"]), found["mismatches"]) == (1, 1, 1)
    assert found["ties"][0] > 0


def test_requests_are_different_calls_that_each_engine_gets_alike() -> None:
    prompts = {str(i): [i] for i in range(8)}
    found = calls(prompts, 24)
    assert len({(call.prompt_id, call.setting) for call in found}) == 24
    assert {call.setting for call in found[:3]} == set(engine_equality.SETTINGS)
    assert calls(prompts, 24) == found


def test_greedy_reference_text_is_what_generate_writes(reference: Reference) -> None:
    assert reference.generate(PROMPT, 24) == right(reference, ReferenceSampling(), 24)


def test_another_seed_is_another_text(reference: Reference) -> None:
    output = right(reference, SAMPLED, 24)
    assert reference.differences(PROMPT, output, replace(SAMPLED, seed=8), 24)


def test_a_token_far_behind_the_best_is_no_tie() -> None:
    assert TokenDifference(0, got=1, expected=2, gap=5e-4).tie
    assert not TokenDifference(0, got=1, expected=2, gap=2e-3).tie
    assert not TokenDifference(0, got=1, expected=2, gap=math.inf).tie


def test_lost_duplicated_and_differing_tokens_are_distinguished() -> None:
    text = list(range(20))
    assert failover.compare(text, text) == (0, 0, 0)
    assert failover.compare(text[:5] + text[7:], text) == (2, 0, 0)
    assert failover.compare([*text[:7], *text[5:]], text) == (0, 2, 0)
    assert failover.compare([*text[:5], 99, *text[6:]], text) == (0, 0, 1)


class EndlessCall:
    """Stand for a stream of gRPC on which nothing comes."""

    def cancel(self) -> None:
        self.cancelled = True

    async def read(self) -> bytes:
        await asyncio.sleep(60.0)
        return b""


async def test_a_sniffed_stream_that_the_device_cancels_ends_for_it_as_one_of_grpc_does_and_stays_open() -> None:
    call: Any = EndlessCall()
    channel: Any = SimpleNamespace(stream_stream=lambda: lambda: call)
    stream = StreamSniffer().channel(AttachTarget("nowhere:1", 1), channel).stream_stream()()
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stream.done() and not hasattr(call, "cancelled")
    closing = asyncio.ensure_future(stream.close())
    stream._reading.cancel()
    await closing


PLAN = [FailoverTrial(KILL, "greedy", PROMPT, 20), FailoverTrial(STOP, "greedy", PROMPT, 20)]


def outcomes(*, lost: int = 0) -> list[TrialResult]:
    return [TrialResult(lost, 0, 0, 80.0, FailoverTrace()), TrialResult(0, 0, 0, 1500.0, FailoverTrace())]


def test_failover_fails_for_what_was_lost_for_accepted_zombies_and_for_silent_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failover.finish(PLAN, outcomes(), StaleCommits(refused=3))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lost"] == 0
    for found, stale in (
        (outcomes(lost=1), StaleCommits(refused=3)),
        (outcomes(), StaleCommits(refused=3, accepted=1)),
        (outcomes(), StaleCommits()),
    ):
        with pytest.raises(SystemExit) as error:
            failover.finish(PLAN, found, stale)
        assert error.value.code not in (0, None)


def test_no_client_of_a_benchmark_limits_the_time_of_its_requests_unless_that_is_measured() -> None:
    """In `chaos` each request allows 60 s; devices of `distill` give up what nobody answers, as a user's would."""
    allowed = {"chaos/device.py", "distill/devices.py", "distill/bad_releases.py"}
    folder = harness.ROOT / "benchmarks"
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "AsyncClient":
                named = {keyword.arg for keyword in node.keywords}  # None: further ones come from elsewhere
                where = str(path.relative_to(folder))
                assert named & {"timeout", None} or where in allowed, f"{where}:{node.lineno} needs timeout=None"


@pytest.mark.parametrize("size", list(Size))
def test_a_slow_machine_fails_no_run_of_chaos(size: Size) -> None:
    found = [*chaos_criteria(defaultdict(int, looks=1, faults=300), minutes=1_000.0)]
    assert not found[-1].met and not any(criterion.fails(size) for criterion in found)


def test_repetitive_texts_are_found_by_their_4_grams() -> None:
    assert not texts.repetitive(range(96))
    assert texts.repetitive([1, 2, 3, 4] * 24)
    assert texts.repetitive([*range(60), *range(36)])
    assert not texts.repetitive([*range(80), *range(16)])


def test_a_token_is_quoted_if_it_stands_in_the_prompt_after_the_same_three() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    assert texts.quoted(prompt, []) == 0.0
    assert texts.quoted(prompt, [1, 2, 3, 4, 5]) == 2 / 5  # 4 and 5
    assert texts.quoted([*prompt, 1, 2, 3], [4, 5, 6, 9]) == 3 / 4  # the quotation has begun in the prompt
    assert texts.quoted(prompt, [7, 8, 9, 7, 8, 9, 7, 8, 9]) == 0.0  # it repeats itself alone
    assert texts.quoted([1], [1, 1]) == 0.0


def test_prompts_that_are_quoted_fit_the_small_target_and_are_of_no_other_split() -> None:
    pair = harness.Pair.in_folder(harness.ROOT / "models")
    quoting = harness.prompts("quoting")
    assert {prompt.kind for prompt in quoting} == {"quoting"} and len(quoting) >= 20
    ids = pair.encode(quoting)
    assert len(ids) == len(quoting) and all(40 < len(tokens) <= 1024 for tokens in ids.values())
    others = {prompt.text for split in ("tuning", "heldout") for prompt in harness.prompts(split)}
    assert not others & {prompt.text for prompt in quoting if prompt.text}
    chats = [prompt for prompt in quoting if prompt.messages]
    assert chats and all(ids[prompt.id].count(0) == len(prompt.messages) for prompt in chats), "no end of turn"


def test_the_prompts_that_ship_are_split_and_enough() -> None:
    tuning, heldout = harness.prompts("tuning"), harness.prompts("heldout")
    assert len(tuning) + len(heldout) >= 120
    assert not {prompt.text for prompt in tuning} & {prompt.text for prompt in heldout}
