"""Test that log-probabilities are a plain softmax of the target's plain logits, whatever draft and attaches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rig import Rig, adversary, client, nothing, perfect, prompt_of, random_tree
from tiny_targets import Reference

from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.messages import TokenLogprobs
from outrider.core.sampling import SamplingParams

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]

SAMPLED = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.3, seed=4, logit_bias=((3, 2.0), (5, -100.0)))


def plain(reference: Reference, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return log-probabilities `[n, V]` at each generated position."""
    with torch.inference_mode():
        logits = reference.module(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float(), dim=-1)


def collected(rig: Rig, name: str) -> dict[int, TokenLogprobs]:
    """Run to the end; return the log-probabilities of session `name` by position."""
    found: dict[int, TokenLogprobs] = {}
    while not rig.clients[name].ended:
        for event in rig.turn():
            if isinstance(event, Committed) and event.session_id == name:
                assert len(event.commit.logprobs) == len(event.commit.tokens)
                found.update(enumerate(event.commit.logprobs, start=event.commit.start))
    return found


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["nothing", "perfect", "random_tree", "adversary"])
def test_they_are_the_targets_own_before_everything_that_sampling_does(
    drafter: str, sampling: SamplingParams, target: Target, reference: Plain
) -> None:
    prompt = prompt_of(17)
    expected = reference("llama").generate(prompt, 24, sampling, ignore_eos=True)
    draft = {"nothing": nothing, "random_tree": random_tree}.get(drafter) or {
        "perfect": perfect,
        "adversary": adversary,
    }[drafter](expected)
    rig = Rig(target("llama"))
    rig.attach("s", client(prompt, draft, sampling=sampling, ignore_eos=True, logprobs=3))
    rig.attach("beside", client(prompt_of(9), random_tree))
    found = collected(rig, "s")
    assert rig.clients["s"].device.received == expected and sorted(found) == list(range(24))
    truth = plain(reference("llama"), prompt, expected)
    for position, token in enumerate(expected):
        best, ids = truth[position].topk(3)
        assert found[position].logprob == pytest.approx(float(truth[position, token]), abs=1e-4)
        assert [value for _, value in found[position].top] == pytest.approx(best.tolist(), abs=1e-4)
        assert found[position].top[0][0] == int(ids[0])


def test_a_session_that_is_attached_again_gets_each_tokens_once(target: Target, reference: Plain) -> None:
    prompt = prompt_of(12)
    expected = reference("llama").generate(prompt, 24, ignore_eos=True)
    rig = Rig(target("llama"))
    one = client(prompt, perfect(expected), ignore_eos=True, logprobs=1)
    rig.attach("s", one)
    known: list[TokenLogprobs] = []
    for turn in range(200):
        if one.ended:
            break
        if turn % 4 == 3:  # what was committed meanwhile never reaches the device
            rig.engine.step()
            rig.attach("s", one)
            continue
        one.draft(one.device, rig.rng)
        while (append := one.device.poll(resting=True)) is not None:
            rig.engine.append("s", append)
        for event in rig.engine.step():
            if isinstance(event, Committed) and (delivery := one.device.on_commit(event.commit)) is not None:
                known += delivery.logprobs
        rig.clock.now += 0.001
    assert one.device.received == expected and len(known) == 24
    truth = plain(reference("llama"), prompt, expected)
    for position, token in enumerate(expected):
        assert known[position].logprob == pytest.approx(float(truth[position, token]), abs=1e-4)
