"""Test that the verifier drafts for sessions whose devices do not: faster, and with the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from rig import Rig, client, nothing, prompt_of
from small_tokenizer import tokenizer_json
from tiny_targets import EOS, VOCAB, Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.server_draft.llama_draft import LlamaServerDraft
from cloud_verifier.engine.server_draft.ngram import ServerNgramSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.constraint import Grammars, GrammarState
from outrider.core.sampling import SamplingParams

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


class Chains:
    """Stand in for llama.cpp with a draft whose logits are the target's own."""

    def __init__(self, model: TargetModel, *, count: int = 8, length: int = 250) -> None:
        self.length = length
        self.fed = 0
        self.most = 0
        """Most sequences in one call."""
        self._model = model
        self._texts: list[list[int]] = [[] for _ in range(count)]

    @property
    def count(self) -> int:
        return len(self._texts)

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def held(self, sequence: int) -> int:
        return len(self._texts[sequence])

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= len(self._texts[sequence])
        del self._texts[sequence][length:]

    def feed(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Any:
        assert feeds
        assert len({sequence for sequence, _ in feeds}) == len(feeds)
        self.most = max(self.most, len(feeds))
        rows = []
        for sequence, tokens in feeds:
            assert tokens
            self._texts[sequence] += tokens
            assert len(self._texts[sequence]) <= self.length
            self.fed += len(tokens)
            rows.append(self._model.linear_logits(self._texts[sequence])[-1].numpy())
        return np.stack(rows)


def test_a_perfect_draft_saves_steps_and_counts_as_our_own(target: Target, reference: Plain) -> None:
    chains = Chains(target("llama"))
    draft = LlamaServerDraft(chains, depth=3, vocabulary=VOCAB, clock=lambda: 0.0)
    rig = Rig(target("llama"), EngineConfig(kv_slots=2048), overlay=Overlay([draft], clock=lambda: 0.0))
    for i in range(4):
        rig.attach(f"s{i}", client(prompt_of(9 + i), nothing, max_tokens=41, ignore_eos=True))
    commits = []
    for _ in range(60):
        commits += [event.commit for event in rig.turn() if isinstance(event, Committed)]
    counters = rig.engine.counters
    for i in range(4):
        expected = reference("llama").generate(prompt_of(9 + i), 41, ignore_eos=True)
        assert rig.clients[f"s{i}"].device.received == expected
    assert counters.committed == 4 * 41
    # Four tokens a step.
    assert counters.steps <= 3 + 41 / 4 + 2
    assert counters.server_accepted == counters.server_evaluated / 2 > 4 * 25  # one sibling beside each
    assert (counters.evaluated, counters.accepted) == (0, 0)
    assert all(commit.evaluated == 0 for commit in commits)
    for session in rig.engine.telemetry.values():
        assert (session.evaluated, session.acceptance_history) == (0, b"")
        assert session.server_gain == pytest.approx(3.0, rel=0.5)
    assert chains.most == 4  # all sessions in one decode


def test_a_prompt_is_not_read_for_an_answer_that_takes_the_target_less_time(target: Target) -> None:
    chains = Chains(target("llama"))  # a second for each token that it reads, more than any step takes
    draft = LlamaServerDraft(chains, depth=3, vocabulary=VOCAB, clock=lambda: float(chains.fed))
    rig = Rig(target("llama"), EngineConfig(kv_slots=2048), overlay=Overlay([draft], clock=lambda: 0.0))
    for name in ("first", "second"):
        before = chains.fed
        rig.attach(name, client(prompt_of(60), nothing, max_tokens=4, ignore_eos=True))
        rig.run()
        assert (chains.fed - before >= 60) is (name == "first"), "what reading takes is measured with the first one"


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)])
def test_sessions_with_a_grammar_gain_and_it_is_followed_along_the_targets_own_tokens_alone(
    sampling: SamplingParams, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer_json(), VOCAB, (EOS,))
    params = dataclasses.replace(sampling, grammar='start: (/[a-f]/ "hello123" /[0-9]/ "world")+')
    paths: list[tuple[int, ...]] = []
    go = GrammarState._go

    def watched(state: GrammarState, path: Sequence[int]) -> None:
        paths.append(tuple(path))
        go(state, path)

    monkeypatch.setattr(GrammarState, "_go", watched)
    received: list[list[int]] = []
    for drafts in (False, True):
        paths.clear()
        chains = Chains(target("llama"))
        draft, ngram = LlamaServerDraft(chains, depth=2, vocabulary=VOCAB), ServerNgramSource()
        overlay = Overlay([draft, ngram] if drafts else [], clock=lambda: 0.0)
        rig = Rig(target("llama"), EngineConfig(kv_slots=2048), overlay=overlay, grammars=grammars)
        rig.attach("s", client(prompt_of(9), nothing, max_tokens=60, sampling=params))
        while not rig.clients["s"].ended:
            known, before = len(paths), len(rig.clients["s"].device.received)
            rig.turn()
            new = tuple(rig.clients["s"].device.received[before:])
            assert all(path == new[: len(path)] for path in paths[known:])
        received.append(rig.clients["s"].device.received)
    assert rig.engine.counters.server_accepted > 0
    assert received[0] == received[1]
    assert len(received[0]) >= 17
