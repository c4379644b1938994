"""Test that every engine scores prompts by its target's own distribution, in chunks and beside other sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from engine_builds import TARGET
from served_devices import Served, device_of, prompt_of

from cloud_verifier.engine.config import EngineConfig
from outrider.core.protocol.messages import Finish, TokenLogprobs

Serve = Callable[..., Served]


@functools.cache
def _module() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@torch.inference_mode()
def truth_of(prompt: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities `[n - 1, V]` of the prompt's tokens from the second on, by plain transformers."""
    logits = _module()(torch.tensor([list(prompt)])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def check(found: Sequence[TokenLogprobs], truth: torch.Tensor, prompt: Sequence[int], top: int) -> None:
    assert len(found) == len(prompt) - 1
    for one, row, token in zip(found, truth, prompt[1:], strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(row.topk(top)[0].tolist(), abs=1e-3)
        assert all(value == pytest.approx(float(row[token]), abs=1e-3) for token, value in one.top)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_a_prompts_log_probabilities_are_the_targets_own(serve: Serve, max_tokens: int) -> None:
    prompts = [prompt_of(length) for length in (2, 20, 129, 700)]
    served = serve()
    served.attach("beside", device_of(prompt_of(50), "sampled", ignore_eos=True))
    for number, prompt in enumerate(prompts):
        asked = device_of(prompt, "penalised", max_tokens, ignore_eos=True, prompt_logprobs=number, logprobs=1)
        served.attach(f"s{number}", asked)
    served.run()
    assert not served.failures
    for number, prompt in enumerate(prompts):
        device = served.devices[f"s{number}"]
        check(device.scored, truth_of(prompt), prompt, number)
        assert (len(device.received), device.finish) == (max_tokens, Finish.LENGTH)
    counters = served.engine.counters
    assert (counters.evaluated, counters.accepted) == (0, 0)
    assert served.engine.stats().verifier.kv_used == 0


def test_a_prompt_that_was_read_before_is_scored_and_changes_no_token(serve: Serve) -> None:
    prompt = prompt_of(300)
    served = serve()
    for name, asked in (("plain", {}), ("scored", {"prompt_logprobs": 1}), ("plain again", {})):
        served.attach(name, device_of(prompt, "sampled", ignore_eos=True, **asked))
        served.run()
    check(served.devices["scored"].scored, truth_of(prompt), prompt, 1)
    received = [device.received for device in served.devices.values()]
    assert received[0] == received[1] == received[2]


def test_a_session_that_is_attached_again_is_scored_to_the_end(serve: Serve) -> None:
    prompt = prompt_of(400)
    served = serve(EngineConfig(kv_slots=4_096, token_budget=64, max_sessions=16))
    device = device_of(prompt, ignore_eos=True, max_tokens=5, prompt_logprobs=2)
    served.attach("s", device)
    for turns in (1, 3, 2):
        for _ in range(turns):
            served.turn()
        served.attach("s", device)
    served.run()
    check(device.scored, truth_of(prompt), prompt, 2)
    again = device_of(prompt, ignore_eos=True, max_tokens=5)
    served.attach("again", again)
    served.run()
    assert again.received == device.received
