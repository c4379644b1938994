"""Test trained heads on their target: more than a token a step, and the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from rig import Rig, client, nothing
from small_pair import HEADS, TARGET, TOKENIZER

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.server_draft.head_models import load_heads
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.sampling import SamplingParams

PROMPTS = (
    "Question: Ben has 3 boxes of 12 pencils. He gives away 10 pencils. How many pencils has he left?\nAnswer:",
    "def read_lines(path):\n",
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trained_heads_give_more_tokens_a_step_and_the_same_ones(temperature: float) -> None:
    model = TargetModel.load(TARGET)
    model.keep_states()
    check_numerics(model)
    heads = load_heads(HEADS, f"sha256:{model.weights_hash}")
    tokenizer: Any = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    received, steps = [], []
    for sources in ([], [HeadsSource(heads, model, vocabulary=model.vocab_size)]):
        rig = Rig(model, EngineConfig(kv_slots=2048), overlay=Overlay(sources, clock=lambda: 0.0))
        for number, text in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=temperature, seed=number)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            rig.attach(f"s{number}", client(ids, nothing, max_tokens=40, ignore_eos=True, sampling=sampling))
        rig.run()
        received.append([one.device.received for one in rig.clients.values()])
        steps.append(rig.engine.counters.steps)
    assert received[0] == received[1]
    assert steps[1] < 0.9 * steps[0]
