"""Test that sessions with typical acceptance are refused unless allowed, keep to the rule, and are counted apart."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from filtered import filtered_log_probs
from rig import Drafter, Rig, client, prompt_of
from tiny_targets import Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import BadRequest
from outrider.core.processors import TokenCounts, penalise
from outrider.core.protocol.device import DeviceSession
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.core.tree import ROOT

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]
ALLOWED = EngineConfig(kv_slots=1024, max_sessions=16, allow_lossy_rules=True)
RULE = TypicalAcceptance(0.05, 0.4)
SAMPLING = {
    "greedy": SamplingParams(typical=RULE),
    "sampled": SamplingParams(temperature=0.8, seed=5, typical=RULE),
    "filters": SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, seed=6, typical=RULE),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=9, typical=RULE),
}
PROMPT = prompt_of(12)


def likely(plain: Reference) -> Drafter:
    """Return a drafter of the target's second and third likeliest tokens, which are seldom its own."""

    def draft(device: DeviceSession, rng: random.Random) -> None:
        tip, tokens = ROOT, [*PROMPT, *device.received]
        for _ in range(3):
            with torch.inference_mode():
                best = plain.module(torch.tensor([tokens])).logits[0, -1].topk(3).indices.tolist()
            for token in best[1:]:
                device.add(tip, token)
            child = device.tree.child(tip, best[1])
            if child is None:
                return
            tip, tokens = child, [*tokens, best[1]]

    return draft


def run(model: TargetModel, draft: Drafter, params: SamplingParams, config: EngineConfig = ALLOWED) -> Rig:
    rig = Rig(model, config)
    rig.attach("s", client(PROMPT, draft, max_tokens=40, sampling=params, ignore_eos=True))
    rig.run()
    return rig


def follows(plain: Reference, tokens: Sequence[int], params: SamplingParams) -> list[str]:
    """Say of each token whether it is the target's own, or likely enough by the rule, or neither."""
    found, rule = [], params.typical
    assert rule is not None
    own = dataclasses.replace(params, typical=None)
    for at, token in enumerate(tokens):
        before = list(tokens[:at])
        with torch.inference_mode():
            logits = plain.module(torch.tensor([[*PROMPT, *before]])).logits[0, -1].numpy().astype(np.float64)
        if token == plain._choose(logits, own, PROMPT, before):
            found.append("own")
            continue
        scores = penalise(logits, params, TokenCounts([*PROMPT, *before]))
        hot = dataclasses.replace(params, temperature=1.0) if params.greedy else params
        log_p = filtered_log_probs(scores, hot)
        log_p -= np.log(np.exp(log_p).sum())
        p = np.exp(log_p)
        left = p[p > 0]
        threshold = min(rule.epsilon, rule.delta * math.exp(float((left * np.log(left)).sum())))
        found.append("likely" if p[token] > threshold * (1 - 1e-3) else "neither")
    return found


@pytest.mark.parametrize("name", SAMPLING)
def test_every_token_is_the_targets_own_or_likely_enough(name: str, target: Target, reference: Plain) -> None:
    plain = reference("llama")
    rig = run(target("llama"), likely(plain), SAMPLING[name])
    found = follows(plain, rig.clients["s"].device.received, SAMPLING[name])
    assert "neither" not in found
    assert found.count("likely") > 3
    assert found.count("own") > 3


def test_it_is_refused_unless_the_operator_allows_it(target: Target) -> None:
    rig = Rig(target("llama"))
    with pytest.raises(BadRequest, match="acceptance_rule is typical, must be coupled: the operator") as caught:
        rig.attach("s", client(PROMPT, sampling=SAMPLING["greedy"]))
    assert caught.value.field == "acceptance_rule"
    rig.attach("s", client(PROMPT))
