"""Test that log-probabilities are a plain softmax of the target's plain logits, whatever draft and attaches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rig import Rig, client, perfect, prompt_of
from tiny_targets import Reference

from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.messages import TokenLogprobs

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


def plain(reference: Reference, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return log-probabilities `[n, V]` at each generated position."""
    with torch.inference_mode():
        logits = reference.module(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float(), dim=-1)


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
