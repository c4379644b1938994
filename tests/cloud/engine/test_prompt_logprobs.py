"""Test that a prompt's log-probabilities are those of plain transformers, in any chunks and beside any neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rig import LIMITS, Rig, adversary, client, nothing, perfect, prompt_of, random_tree
from tiny_targets import VOCAB, Reference

from cloud_verifier.engine import engine as engine_module
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.device_sampling import DeviceSampler, Wanted
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.sampling import scores_of
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.messages import Commit, Finish, TokenLogprobs
from outrider.core.sampling import SamplingParams

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]

CHUNKS = EngineConfig(kv_slots=2048, max_sessions=16, token_budget=16, prefill_chunk=8)


def plain(module: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities `[n - 1, V]` of the prompt's tokens from the second on."""
    with torch.inference_mode():
        logits = module(torch.tensor([list(prompt)])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def check(found: Sequence[TokenLogprobs], truth: torch.Tensor, prompt: Sequence[int], top: int) -> None:
    assert len(found) == len(prompt) - 1
    for one, row, token in zip(found, truth, prompt[1:], strict=True):
        best, ids = row.topk(top)
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(best.tolist(), abs=1e-4)
        assert [token for token, _ in one.top][:1] == ids.tolist()[:1]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_they_are_the_targets_own(kind: str, max_tokens: int, target: Target, reference: Plain) -> None:
    prompts = [prompt_of(length, length) for length in (1, 2, 16, 17, 130)]
    sampling = SamplingParams(temperature=0.9, top_k=5, repetition_penalty=1.4, seed=3, logit_bias=((3, 9.0),))
    rig = Rig(target(kind), CHUNKS)
    expected = reference(kind).generate(prompt_of(40), 24, ignore_eos=True)
    rig.attach("beside", client(prompt_of(40), adversary(expected), ignore_eos=True))
    for number, prompt in enumerate(prompts):
        wanted = client(prompt, random_tree, max_tokens, sampling=sampling, ignore_eos=True, prompt_logprobs=3)
        rig.attach(f"s{number}", wanted)
    rig.run()
    assert rig.clients["beside"].device.received == expected
    for number, prompt in enumerate(prompts):
        device = rig.clients[f"s{number}"].device
        assert not rig.clients[f"s{number}"].errors and device.finish is Finish.LENGTH
        check(device.scored, plain(reference(kind).module, prompt), prompt, 3)
        if max_tokens:
            assert device.received == reference(kind).generate(prompt, max_tokens, sampling, ignore_eos=True)
    assert rig.slots == (0, 0)


def test_a_prompt_that_is_cached_is_scored_all_the_same_and_serves_others_then(
    target: Target, reference: Plain
) -> None:
    prompt = prompt_of(90)
    rig = Rig(target("llama"), CHUNKS)
    for name in ("first", "second", "third"):
        scores = name != "third"
        before = rig.engine.counters.prefix_tokens
        rig.attach(name, client(prompt, nothing, 2, prompt_logprobs=0 if scores else None))
        assert rig.engine.counters.prefix_tokens - before == (0 if scores else 89)
        rig.run()
        if scores:
            check(rig.clients[name].device.scored, plain(reference("llama").module, prompt), prompt, 0)
    assert len({tuple(one.device.received) for one in rig.clients.values()}) == 1


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_session_that_is_attached_again_gets_the_rest(max_tokens: int, target: Target, reference: Plain) -> None:
    prompt = prompt_of(120)
    expected = reference("llama").generate(prompt, max_tokens, ignore_eos=True)
    rig = Rig(target("llama"), CHUNKS)
    one = client(prompt, perfect(expected), max_tokens, ignore_eos=True, prompt_logprobs=2)
    rig.attach("s", one)
    computed, cached = [], 0
    for turn in range(400):
        if one.ended:
            break
        if turn % 4 == 3:
            rig.engine.step()  # what this brings never reaches the device
            before = rig.engine.counters.prefix_tokens
            rig.attach("s", one)
            cached += rig.engine.counters.prefix_tokens - before
            continue
        rig.turn()
        computed.append(len(one.device.scored))
    assert one.device.received == expected and computed == sorted(computed) and len(set(computed)) > 5
    assert cached > 100  # what needs no score is not computed again
    check(one.device.scored, plain(reference("llama").module, prompt), prompt, 2)


def test_scored_rows_are_no_drafts_no_records_and_no_tokens(target: Target) -> None:
    rig = Rig(target("llama"), CHUNKS)
    one = client(prompt_of(100), nothing, 0, prompt_logprobs=1)
    rig.engine.start("s", one.device.attach(1, LIMITS), LIMITS, one.directive, record=True)
    rig.clients["s"] = one
    commits: list[Commit] = []
    while not one.ended:
        commits += [event.commit for event in rig.turn() if isinstance(event, Committed)]
        assert rig.engine.take_recorded() == []
    counters, telemetry = rig.engine.counters, rig.engine.stats().sessions["s"]
    assert (counters.drafts, counters.evaluated, counters.committed, counters.prefilled) == (0, 0, 0, 100)
    assert (telemetry.steps, telemetry.committed, telemetry.evaluated, telemetry.acceptance_history) == (0, 0, 0, b"")
    assert [len(commit.prompt_logprobs) for commit in commits] == [16] * 6 + [3]
    assert all(not commit.tokens and not commit.evaluated for commit in commits)


def test_a_step_scores_no_more_rows_than_their_logits_may_take(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SCORED_BYTES", 5 * 4 * VOCAB)
    prompts = [prompt_of(40, number) for number in range(4)]
    rig = Rig(target("llama"), CHUNKS)
    rig.attach("beside", client(prompt_of(60), nothing, 4))
    for number, prompt in enumerate(prompts):
        rig.attach(f"s{number}", client(prompt, nothing, 0, prompt_logprobs=0))
    while not all(one.ended for one in rig.clients.values()):
        events = rig.turn()
        assert sum(len(event.commit.prompt_logprobs) for event in events if isinstance(event, Committed)) <= 5
    for number, prompt in enumerate(prompts):
        check(rig.clients[f"s{number}"].device.scored, plain(reference("llama").module, prompt), prompt, 0)


class OwnRows(DeviceSampler):
    """Choose greedily, of rows of which each one is wanted."""

    def choose(self, logits: torch.Tensor, wanted: Wanted) -> list[int | None]:
        assert len(logits) == len(wanted)
        return super().choose(logits, wanted)


def test_tokens_that_are_chosen_on_a_device_are_those_of_their_own_rows(target: Target, reference: Plain) -> None:
    rig = Rig(target("llama"), CHUNKS)
    rig.executor._device_sampler = OwnRows(object())
    prompts = {f"s{number}": prompt_of(30 + 7 * number, number) for number in range(4)}
    expected = {name: reference("llama").generate(prompt, 12, ignore_eos=True) for name, prompt in prompts.items()}
    for number, (name, prompt) in enumerate(prompts.items()):
        scores = 1 if number % 2 else None
        rig.attach(name, client(prompt, perfect(expected[name]), 12, ignore_eos=True, prompt_logprobs=scores))
    rig.run()
    assert {name: one.device.received for name, one in rig.clients.items()} == expected


def test_long_prompts_are_scored_slice_by_slice() -> None:
    vocabulary = 1 << 20
    logits = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = list(range(20))
    found = scores_of(logits, tokens, 2)  # 2 rows are a slice
    truth = logits.float().log_softmax(-1)
    assert [one.logprob for one in found] == pytest.approx([float(truth[i, i]) for i in tokens], abs=1e-4)
    assert [one.top[0][1] for one in found] == pytest.approx(truth.max(-1).values.tolist(), abs=1e-4)
