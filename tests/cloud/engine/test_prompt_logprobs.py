"""Test that a prompt's log-probabilities are those of plain transformers, in any chunks and beside any neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rig import LIMITS, Rig, client, nothing, prompt_of
from tiny_targets import VOCAB, Reference

from cloud_verifier.engine import engine as engine_module
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.messages import Commit, TokenLogprobs

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
