"""Test the measurement in llama.cpp: counts by hand, and the shipped drafts against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloud_verifier.distill.config import GateRule
from cloud_verifier.distill.gguf.eval_gguf import CHAIN, TREE, UNPROMPTED, compare, steps
from cloud_verifier.distill.publishing.gate import decide
from outrider.core.errors import BadRequest
from outrider.llama import LlamaModel, TextContext, TreeContext

MODELS = Path(__file__).resolve().parents[3] / "models"
SUMS = (
    ("Hana has 12 marbles and wins 9 more.", "Hana has 12 + 9 = 21 marbles.", 21),
    ("A box holds 6 eggs. There are 7 boxes.", "There are 6 * 7 = 42 eggs in total.", 42),
    ("Omar reads 15 pages a day for 4 days.", "He reads 15 * 4 = 60 pages in total.", 60),
    ("A pen costs $3. Lena buys 8 pens.", "She pays 8 * 3 = $24 for the pens.", 24),
    ("Tom had 50 stickers and gave away 18.", "Tom has 50 - 18 = 32 stickers left.", 32),
    ("A train goes 80 miles an hour for 3 hours.", "It goes 80 * 3 = 240 miles.", 240),
    ("There are 36 apples for 9 children.", "Each child gets 36 / 9 = 4 apples.", 4),
    ("Mia earns $14 an hour and works 5 hours.", "Mia earns 14 * 5 = $70.", 70),
    ("A farmer has 25 cows and buys 17.", "The farmer has 25 + 17 = 42 cows.", 42),
    ("Jo ran 4 miles on each of 6 days.", "Jo ran 4 * 6 = 24 miles in total.", 24),
)


@dataclass(frozen=True)
class HeldOutText:
    tokens: NDArray[np.int32]
    traffic_class: str = "arithmetic"
    session: int = 0
    first: int = 1


@pytest.fixture(scope="module")
def sums() -> list[HeldOutText]:
    with LlamaModel.load(MODELS / "draft.gguf") as model:
        texts = [
            f"Question: {asked} How many is that?\nAnswer: {worked}\nThe answer is {n}." for asked, worked, n in SUMS
        ]
        return [HeldOutText(np.array(model.tokenize(text), np.int32), session=i) for i, text in enumerate(texts)]


def ranks(*values: int) -> NDArray[np.int8]:
    return np.array(values, np.int8)


def test_a_step_commits_what_the_chain_got_right_and_one_token_more() -> None:
    assert steps(ranks(0, 0, 2, 0, 2), 6, 1) == 2
    assert steps(ranks(2, 2, 2), 6, 1) == 3
    assert steps(ranks(*[0] * 7), 6, 1) == 1
    assert steps(ranks(*[0] * 8), 6, 1) == 2


def test_a_second_proposal_that_is_right_is_committed_and_ends_the_path() -> None:
    assert steps(ranks(0, 1, 0, 0), 6, 1) == 2
    assert steps(ranks(0, 1, 2, 0), 6, 2) == 2
    assert steps(ranks(1, 0, 1, 0), 6, 2) == 2
    assert steps(ranks(0, 0, 1, 2), 2, 2) == 2, "below the last level there is no second proposal"


@given(st.lists(st.integers(0, 2), max_size=60))
def test_the_tree_never_takes_more_steps_than_the_chain(values: list[int]) -> None:
    assert steps(ranks(*values), CHAIN, TREE) <= steps(ranks(*values), CHAIN, 1) <= len(values)


def test_the_general_draft_beats_the_narrow_one_on_arithmetic(sums: list[HeldOutText]) -> None:
    measured = compare(MODELS / "draft.gguf", MODELS / "draft-narrow.gguf", sums)
    verdict = decide(measured, {"arithmetic"}, GateRule())
    assert verdict.fresh is not None
    assert verdict.fresh.chain_gain > 0.2
    assert verdict.fresh.candidate.acceptance > verdict.fresh.incumbent.acceptance + 0.1
    assert not [reason for reason in verdict.reasons if "ms" not in reason]
    assert verdict.candidate_ms > 0


def test_the_narrow_draft_is_refused_where_the_general_one_serves(sums: list[HeldOutText]) -> None:
    verdict = decide(compare(MODELS / "draft-narrow.gguf", MODELS / "draft.gguf", sums), {"arithmetic"}, GateRule())
    assert not verdict.passed


def test_a_draft_against_itself_is_even(sums: list[HeldOutText]) -> None:
    for text in compare(MODELS / "draft.gguf", MODELS / "draft.gguf", sums[:3]).texts:
        assert text.candidate == text.incumbent


def test_only_tokens_after_the_context_count(sums: list[HeldOutText]) -> None:
    whole, late, short = (
        sums[0],
        HeldOutText(sums[0].tokens, first=20),
        HeldOutText(sums[0].tokens[:UNPROMPTED]),
    )
    strange = HeldOutText(np.append(whole.tokens, np.int32(1_000_000)))
    counted = compare(MODELS / "draft.gguf", MODELS / "draft-narrow.gguf", [whole, late, short, strange]).texts
    assert [text.positions for text in counted] == [len(whole.tokens) - UNPROMPTED, len(whole.tokens) - 20]


def test_a_text_read_at_once_has_the_logits_of_one_read_token_by_token(sums: list[HeldOutText]) -> None:
    tokens = sums[0].tokens.tolist()
    with LlamaModel.load(MODELS / "draft.gguf") as model:
        with TextContext(model, length=128, batch=16) as reader:
            list(reader.read(tokens[::-1]))
            read = np.concatenate(list(reader.read(tokens)))
        with TreeContext(model, n_ctx=128) as context:
            rows, parent = [context.reset(tokens[:1])], 0
            for token in tokens[1:]:
                (parent,), logits = context.decode([parent], [token])
                rows.append(logits[0])
    alone = np.stack(rows)
    assert np.allclose(read, alone, atol=0.1)  # of logits to 20; a batch's products are summed in another order
    assert (read.argmax(1) == alone.argmax(1)).mean() > 0.95


def test_a_reader_refuses_what_would_kill_the_process() -> None:
    with LlamaModel.load(MODELS / "draft.gguf") as model, TextContext(model, length=16) as reader:
        for tokens in ([], [0] * 17, [-1], [model.vocab_size]):
            with pytest.raises(BadRequest):
                list(reader.read(tokens))
