"""Test the scaled copies, the prompts and the figures of `benchmarks.long_context`."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import long_context
from benchmarks.long_context import ARMS, BOTH, DRAFT, POSITIONS, STREAMING, TRAINED, Answers
from benchmarks.support import harness
from benchmarks.support.harness import Pair, Size
from benchmarks.support.long_prompts import LongPrompts
from benchmarks.support.reference import TIE, ReferenceSampling, TokenDifference
from cloud_verifier.distill.gguf.reader import read_gguf
from edge_agent.sdk.types import Completion
from edge_agent.session.statistics import Statistics, Usage
from outrider.core.errors import BadRequest
from outrider.llama import LlamaModel, TreeContext

PAIR = Pair.in_folder(harness.ROOT / "models")
PROMPTS = harness.prompts("heldout", 2)
STORY = tuple(range(100, 120))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return long_context.scaled_pair(PAIR, tmp_path_factory.mktemp("copies"), TRAINED)


@pytest.fixture(scope="module")
def texts() -> LongPrompts:
    return LongPrompts(PAIR)


def test_the_target_of_the_copies_has_the_same_weights_and_more_positions(copies: Pair) -> None:
    config = json.loads((copies.target / "config.json").read_text())
    assert config["max_position_embeddings"] == POSITIONS
    yarn = {"rope_type": "yarn", "factor": POSITIONS / TRAINED, "original_max_position_embeddings": TRAINED}
    assert config["rope_parameters"].items() >= yarn.items()
    assert {file.name for file in copies.target.iterdir()} == {file.name for file in PAIR.target.iterdir()}
    for weights in PAIR.target.glob("*.safetensors"):
        assert (copies.target / weights.name).readlink() == weights.resolve()
    assert copies.heads is None, "heads are refused with a target of another configuration"


def test_a_target_that_is_scaled_already_is_refused(copies: Pair, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="positions of type yarn"):
        long_context.scaled_pair(copies, tmp_path, TRAINED)
    with pytest.raises(BadRequest, match="trained"):
        long_context.scaled_pair(PAIR, tmp_path, POSITIONS)


def test_llama_cpp_scales_the_draft_as_transformers_does(copies: Pair, texts: LongPrompts) -> None:
    plain = read_gguf(PAIR.draft)
    config = copy.deepcopy(plain.config)
    config.rope_parameters = json.loads((copies.target / "config.json").read_text())["rope_parameters"]
    config.max_position_embeddings = POSITIONS
    scaled = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    scaled.load_state_dict(plain.state_dict())
    tokens = texts.code[:1_500]
    with LlamaModel.load(copies.draft) as model, TreeContext(model, n_ctx=2_048) as context:
        assert model.n_ctx_train == POSITIONS
        found = context.reset(tokens)
    with torch.inference_mode():
        as_scaled, as_plain = (one(torch.tensor([tokens])).logits[0, -1].numpy() for one in (scaled, plain))
    assert np.abs(found - as_scaled).max() < 0.3  # llama.cpp rounds what it multiplies with quantised weights
    assert np.abs(found - as_plain).max() > 1.0


def test_prompts_share_a_context_of_the_wanted_length(texts: LongPrompts) -> None:
    ids = PAIR.encode(PROMPTS)
    first, second = texts.after(1_000, "Part 1", PROMPTS)
    assert first[:1_000] == second[:1_000] and first[1_000:] != second[1_000:]
    for prompt, one in zip((first, second), PROMPTS, strict=True):
        assert prompt[-len(ids[one.id]) :] == ids[one.id]
        assert 0 < len(prompt) - 1_000 - len(ids[one.id]) < 5
    assert texts.after(0, "Part 1", PROMPTS) == [ids[one.id] for one in PROMPTS]


def test_contexts_with_other_titles_have_no_long_beginning_in_common(texts: LongPrompts) -> None:
    one, other = (texts.after(1_000, title, PROMPTS[:1])[0] for title in (long_context.WARM, long_context.COLD))
    assert one[:8] != other[:8]
    assert len(one) == len(other)


def test_a_context_longer_than_the_code_is_refused(texts: LongPrompts) -> None:
    with pytest.raises(BadRequest, match="all held-out code"):
        texts.after(10**6, "Part 1", PROMPTS)


def test_the_code_is_enough_for_a_full_run_and_its_positions_too(texts: LongPrompts) -> None:
    longest = max(long_context.FULL.contexts)
    assert all(len(prompt) + long_context.PATIENCE <= POSITIONS for prompt in texts.after(longest, "Part 1", PROMPTS))


def completion(tokens: Sequence[int], seconds: float, accepted_per_step: Sequence[int] = ()) -> Completion:
    """Return a completion that took so long after its first token, in as few steps as were accepted."""
    accepted = sum(number * count for number, count in enumerate(accepted_per_step))
    counts = Statistics(
        tokens=len(tokens),
        steps=len(tokens) - accepted,
        accepted=accepted,
        accepted_per_step=list(accepted_per_step),
        first_token_s=0.5,
        last_token_s=0.5 + seconds,
    )
    return Completion(
        text="",
        token_ids=tuple(tokens),
        drafted=(False,) * len(tokens),
        verified=True,
        logprobs=None,
        finish_reason="length",
        usage=Usage(1, len(tokens)),
        seed=0,
        session_id="",
        statistics=counts,
    )


def answers(
    tokens: Sequence[int] = STORY, *, setting: str = "greedy", context: int = 0, **arms: Sequence[int]
) -> Answers:
    """Return answers in which plain streaming takes 2 s and each other arm 1 s. arms: tokens where they differ."""
    got = {arm: completion(arms.get(arm, tokens), 1.0, (2, 1, 3)) for arm in ARMS}
    return Answers(context, "one", (1, 2, 3), setting, {**got, STREAMING: completion(tokens, 2.0)})


def test_figures_are_by_arm_and_count_repetitive_texts_apart() -> None:
    found = long_context.figures([answers(), answers(setting="T=0.8"), answers((7, 8) * 10)])
    assert found["repetitive"] == pytest.approx(1 / 3, abs=1e-3)
    assert {group: row["texts"] for group, row in found["arms"][DRAFT].items()} == {
        "greedy": 1,
        "T=0.8": 1,
        "repetitive": 1,
    }
    drafted = found["arms"][DRAFT]["greedy"]
    assert drafted["tokens_per_step"] == round(20 / 13, 3)
    assert drafted["first_accepted"] == round(4 / 6, 3)
    assert (drafted["tokens_per_s"], drafted["over_streaming"], drafted["first_token_s"]) == (20.0, 2.0, 0.5)
    streamed = found["arms"][STREAMING]["greedy"]
    assert (streamed["tokens_per_step"], streamed["first_accepted"], streamed["over_streaming"]) == (1.0, None, 1.0)


def test_both_sources_are_compared_with_the_best_arm_of_the_others() -> None:
    found = long_context.figures([slow := answers(), answers(setting="T=0.8")])
    assert found["both_over_best"] == {"greedy": 1.0, "T=0.8": 1.0}
    late = {**slow.completions, BOTH: completion(STORY, 4.0, (2, 1, 3))}
    found = long_context.figures([dataclasses.replace(slow, completions=late)])
    assert found["both_over_best"] == {"greedy": 0.25, "T=0.8": None}
    result = {"short_agreement": {"shipped": 1, "scaled": 1}, "mismatches": 0, "contexts": {"0": found}}
    assert [one.met for one in long_context.criteria(result)] == [True, True, False, False]


def test_groups_without_texts_have_no_figures() -> None:
    row = long_context.figures([answers()])["arms"][BOTH]["T=0.8"]
    assert row.pop("texts") == 0
    assert set(row.values()) == {None}


class FakeReference:
    """Finds the gaps that it is given, and differences of the output that it is given."""

    def __init__(self, gap: float, differences: Sequence[TokenDifference] = ()) -> None:
        self._gap = gap
        self._differences = list(differences)
        self.asked: list[tuple[list[int], tuple[int, ...]]] = []
        self.checked = 0

    def gap(self, prompt: list[int], before: list[int], settings: ReferenceSampling, tokens: Sequence[int]) -> float:
        self.asked.append((before, tuple(tokens)))
        return self._gap

    def differences(self, *_: object) -> list[TokenDifference]:
        self.checked += 1
        return self._differences


def compared(some: Sequence[Answers], reference: Any) -> tuple[int, int]:
    """Return the number of ties and of mismatches."""
    found = long_context.compare(some, reference, tokens=20)
    return len(found.ties), len(found.mismatches)


def test_equal_outputs_are_neither_ties_nor_mismatches() -> None:
    reference = FakeReference(1.0)
    assert compared([answers(), answers(setting="T=0.8"), answers(context=300)], reference) == (0, 0)
    assert reference.checked == 2, "one text of each context is compared with the reference"


@pytest.mark.parametrize(("gap", "counted"), [(TIE / 2, (1, 0)), (2 * TIE, (0, 1))])
def test_the_first_token_that_differs_tells_a_tie_from_a_mismatch(gap: float, counted: tuple[int, int]) -> None:
    reference = FakeReference(gap)
    assert compared([answers(draft=(*STORY[:5], 7, *STORY[6:]))], reference) == counted
    assert reference.asked == [(list(STORY[:5]), (STORY[5], 7))]


def test_an_output_that_ends_early_is_a_mismatch() -> None:
    reference = FakeReference(0.0)
    assert compared([answers(draft=STORY[:5])], reference) == (0, 1)


def test_streaming_that_is_not_the_references_is_a_mismatch() -> None:
    reference = FakeReference(0.0, [TokenDifference(3, 7, 8, 0.5), TokenDifference(9, -1, -1, math.inf)])
    assert compared([answers()], reference) == (0, 2)


@pytest.mark.parametrize(
    ("scaled", "mismatches", "fails"), [(0.4, 0, False), (0.3, 0, True), (0.4, 1, True), (0.0, 0, True)]
)
def test_a_run_of_any_size_fails_for_a_mismatch_or_copies_that_do_not_agree(
    scaled: float, mismatches: int, fails: bool
) -> None:
    contexts = {"0": {"both_over_best": {"greedy": 0.5}}}
    result = {"short_agreement": {"shipped": 0.42, "scaled": scaled}, "mismatches": mismatches, "contexts": contexts}
    assert any(one.fails(Size.SMOKE) for one in long_context.criteria(result)) == fails
