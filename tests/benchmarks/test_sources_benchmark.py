"""Test how `benchmarks.sources` counts steps, and that it can tell a source that helps from one that does not."""

from __future__ import annotations

import pytest

from benchmarks import sources
from benchmarks.sources import ARMS, SETTINGS, ArmResult, StepCount, TargetText
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.errors import BadRequest
from outrider.core.ngram import NgramTable
from outrider.core.sampling import SamplingParams

STORY = tuple(range(100, 140))


def text(prompt: tuple[int, ...], output: tuple[int, ...]) -> TargetText:
    return TargetText("code", prompt, output, SamplingParams())


def drafter(store: NgramTable | None = None) -> Drafter:
    return Drafter([CalibratedSource(NgramSource(lambda: store), Calibrator(), Calibrator())], clock=lambda: 0.0)


def test_a_text_that_nothing_predicts_takes_a_step_for_each_token() -> None:
    count = sources.play(drafter(), text((1, 2, 3), STORY), frozenset())
    assert (count.texts, count.tokens, count.steps) == (1, len(STORY), len(STORY))


def test_a_text_that_quotes_its_prompt_takes_fewer_steps_and_evaluates_nodes() -> None:
    made = drafter()
    for _ in range(5):
        sources.play(made, text(STORY, STORY), frozenset())
    count = sources.play(made, text(STORY, STORY), frozenset())
    assert count.tokens == len(STORY) and count.steps < len(STORY) / 3
    assert 0 < count.nodes <= sources.NODES * count.steps
    assert count.tokens <= count.steps + count.nodes


def test_a_store_of_like_texts_helps_where_the_text_itself_does_not() -> None:
    store = NgramTable.build([STORY] * 3, least_sequences=3)
    with_store, without = drafter(store), drafter()
    for _ in range(5):
        helped, alone = (sources.play(one, text((1, 2, 3), STORY), frozenset()) for one in (with_store, without))
    assert helped.steps < alone.steps / 2


def test_the_least_ratio_of_a_mixture_is_to_its_own_best_source() -> None:
    def arm(tokens: int) -> dict[str, ArmResult]:
        return {setting: ArmResult({"code": StepCount(1, tokens, 100)}) for setting in SETTINGS}

    alike = {name: arm(200) for name in ARMS}
    assert sources.summary(alike)["mixture_over_best"] == 1.0
    better = sources.summary({**alike, "draft": arm(300), "draft+ngram": arm(270)})
    assert better["mixture_over_best"] == pytest.approx(200 / 300, abs=1e-3)  # the other mixtures with this draft
    assert better["draft"] == 3.0 and better["heads"] is None


def test_a_repetitive_text_counts_apart() -> None:
    result = ArmResult({"code": StepCount(1, 10, 5, 8)}, StepCount(1, 90, 10, 80))
    assert result.shown["all"] == {"texts": 1, "tokens_per_step": 2.0, "nodes_per_step": 1.6}
    assert result.shown["repetitive"]["tokens_per_step"] == 9.0


def test_an_arm_alone_is_measured_beside_its_sources_and_one_that_is_not_there_is_refused() -> None:
    assert sources._chosen(["draft, server heads+ngram"]) == {
        "draft, server heads+ngram",
        "draft",
        "server heads",
        "server ngram",
    }
    with pytest.raises(BadRequest, match="there is no arm 'drafts'"):
        sources._chosen(["drafts"])
