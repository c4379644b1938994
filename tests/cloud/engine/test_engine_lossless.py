"""Test that the output equals that of plain transformers, whatever the draft, the batch and the chunking (I1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rig import Drafter, Rig, adversary, client, nothing, perfect, prompt_of, random_tree
from session_messages import append
from tiny_targets import Reference

from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.sampling import SamplingParams

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]

DRAFTERS: dict[str, Callable[[list[int]], Drafter]] = {
    "nothing": lambda expected: nothing,
    "perfect": perfect,
    "random_tree": lambda expected: random_tree,
    "adversary": adversary,
}
SAMPLING = {
    "plain": SamplingParams(temperature=0.8, seed=5),
    "filters": SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, seed=6),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=2**64 - 1
    ),
    "greedy with penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_output_is_that_of_a_plain_loop_with_the_same_noise(
    name: str, drafter: str, target: Target, reference: Plain
) -> None:
    prompt, params = prompt_of(12, seed=3), SAMPLING[name]
    expected = reference("qwen3").generate(prompt, 32, params)
    rig = Rig(target("qwen3"))
    rig.attach("s", client(prompt, DRAFTERS[drafter](expected), max_tokens=32, sampling=params))
    rig.run()
    assert rig.clients["s"].device.received == expected


@pytest.mark.parametrize(
    "end", [{}, {"stop_token_ids": "the 5th token", "ignore_eos": True}], ids=["by EOS", "by a stop token"]
)
def test_an_end_inside_an_accepted_path_ends_the_sequence_there(
    end: dict[str, Any], target: Target, reference: Plain
) -> None:
    sampling = SamplingParams(temperature=2.0, seed=11)
    for seed in range(40):
        prompt = prompt_of(6, seed)
        free = reference("qwen3").generate(prompt, 30, sampling, ignore_eos=True)
        options = dict(end)
        stop: tuple[int, ...] = ()
        if "stop_token_ids" in options:
            stop = options["stop_token_ids"] = (free[4],)
        expected = reference("qwen3").generate(
            prompt, 30, sampling, ignore_eos=options.get("ignore_eos", False), stop=stop
        )
        if 2 < len(expected) < 30:
            break
    else:
        raise AssertionError("no prompt ends early")
    rig = Rig(target("qwen3"))
    rig.attach("s", client(prompt, perfect(free), max_tokens=30, sampling=sampling, **options))
    rig.run()
    assert rig.clients["s"].device.received == expected
    assert rig.clients["s"].device.finish.name == "EOS"
    assert rig.slots == (0, 0)


def test_a_draft_past_the_longest_sequence_of_the_model_is_harmless(target: Target, reference: Plain) -> None:
    # GPT-2 has a table of 256 positions and nothing beyond.
    prompt = prompt_of(250)
    expected = reference("gpt2").generate(prompt, 6, ignore_eos=True)
    rig = Rig(target("gpt2"))
    one = client(prompt, nothing, max_tokens=6, ignore_eos=True)
    rig.attach("s", one)
    # A device that breaks rule 2: eight nodes deep with six tokens to come.
    chain = [*expected, 3, 3]
    rig.engine.append("s", append(1, 1, 0, (0, *range(1, 8)), tuple(chain)))
    rig.run()
    assert one.device.received == expected
