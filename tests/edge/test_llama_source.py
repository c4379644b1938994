"""Test the draft on llama.cpp: a draft that is the target itself must propose every token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from filtered import filtered_log_probs

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask, NodeContext
from edge_agent.drafting.sources.llama import LlamaSource
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.processors import TokenCounts, penalise
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT
from outrider.llama import LlamaModel, TreeContext

PROMPT = (72, 101, 108, 108, 111, 32, 33)
PLAN = SpeculationPlan(nodes=24, depth=8, nodes_per_step=10, min_acceptance=0.02, draft_wait_s=0.008, step_s=0.01)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.02, seed=7),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.2, repetition_penalty=1.2, seed=2**64 - 1),
]


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[LlamaModel]:
    with LlamaModel.load(tiny_gguf) as model:
        yield model


@pytest.fixture
def context(model: LlamaModel) -> Iterator[TreeContext]:
    with TreeContext(model, n_ctx=256, max_sequences=32, batch=64, kv_type="f32") as context:
        yield context


class Reference:
    """Compute the target's token by the core's own full processors, with one linear pass per token."""

    def __init__(self, model: LlamaModel, sampling: SamplingParams) -> None:
        self._context = TreeContext(model, n_ctx=256, max_sequences=1, batch=256, kv_type="f32")
        self._sampling = sampling
        self._key = session_key(sampling.seed, PROMPT)

    def token(self, generated: list[int]) -> int:
        logits = self._context.reset([*PROMPT, *generated]).astype(np.float64)
        logits = penalise(logits, self._sampling, TokenCounts(PROMPT, generated))
        if self._sampling.greedy:
            return int(logits.argmax())
        noise = gumbel(position_key(self._key, len(generated)), np.arange(logits.shape[0]))
        return int((filtered_log_probs(logits, self._sampling) + noise).argmax())

    def close(self) -> None:
        self._context.close()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_draft_equal_to_the_target_proposes_what_the_target_accepts(
    model: LlamaModel, context: TreeContext, sampling: SamplingParams
) -> None:
    reference = Reference(model, sampling)
    source = LlamaSource(context, shared_vocabulary=model.vocab_size)
    drafter = Drafter([CalibratedSource(source, Calibrator(), Calibrator(), DecodeLatency(((1, 1e-3), (4, 1.2e-3))))])
    drafter.begin(DraftTask(PROMPT, sampling=sampling, max_tokens=100), PLAN)
    generated: list[int] = []
    first_accepted = 0
    while len(generated) < 40:
        while drafter.step():
            pass
        accepted, node = [], ROOT
        # Walk as the verifier does: as far as the tree carries the target's tokens, and one token more.
        while True:
            token = reference.token([*generated, *accepted])
            children = drafter._tree.children(node)
            first_accepted += bool(children) and next(iter(children)) == token
            accepted.append(token)
            if token not in children:
                break
            node = children[token]
        generated += accepted
        drafter.advance(accepted)
    reference.close()
    assert first_accepted >= 0.9 * (len(generated) - 12)  # the deepest token of a walk was never proposed


def test_ids_that_are_special_tokens_of_another_name_are_never_proposed(
    model: LlamaModel, context: TreeContext
) -> None:
    root = [NodeContext(ROOT, ROOT, -1, 0, ())]
    usual = LlamaSource(context, shared_vocabulary=model.vocab_size)
    usual.begin(DraftTask(PROMPT))
    best, second = (one.token for one in usual.expand(root)[0][:2])
    source = LlamaSource(context, shared_vocabulary=model.vocab_size, unlike=[best])
    source.begin(DraftTask(PROMPT))
    assert source.expand(root)[0][0].token == second


def test_committing_a_path_goes_on_where_a_fresh_prefill_would(context: TreeContext, model: LlamaModel) -> None:
    source = LlamaSource(context, shared_vocabulary=model.vocab_size)
    source.begin(DraftTask(PROMPT))
    first = source.expand([NodeContext(ROOT, ROOT, -1, 0, ())])[0][0].token
    second = source.expand([NodeContext(1, ROOT, first, 1, (first,))])[0][0].token
    source.expand([NodeContext(2, 1, second, 2, (first, second))])
    source.advance([1, 2], [first, second, 9])
    after = source.expand([NodeContext(ROOT, ROOT, -1, 3, ())])[0]
    with TreeContext(model, n_ctx=256, max_sequences=4, batch=64, kv_type="f32") as fresh:
        other = LlamaSource(fresh, shared_vocabulary=model.vocab_size)
        other.begin(DraftTask(PROMPT, received=(first, second, 9)))
        expected = other.expand([NodeContext(ROOT, ROOT, -1, 3, ())])[0]
    assert [p.token for p in after] == [p.token for p in expected]
    assert [p.margin for p in after] == pytest.approx([p.margin for p in expected], abs=1e-3)
