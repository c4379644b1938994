"""Test the arithmetic by which benchmarks.lossless judges what rounding changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import lossless
from benchmarks.support.step_shapes import SHAPES, UNDRAFTED, Shape, StepReader, flipped, probability_moved


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a tiny random model; steps are computed by one thread."""
    folder, threads = tmp_path_factory.mktemp("target"), torch.get_num_threads()
    torch.manual_seed(0)
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**small, vocab_size=101, max_position_embeddings=256)).save_pretrained(folder)
    yield folder
    torch.set_num_threads(threads)


def texts(count: int) -> list[lossless.Text]:
    rng = random.Random(0)
    return [
        ([rng.randrange(101) for _ in range(9 + i)], [rng.randrange(101) for _ in range(20 + i)]) for i in range(count)
    ]


@pytest.mark.parametrize("shape", [UNDRAFTED, *SHAPES, Shape("trees of 3 users", nodes=5, accepted=5, at_once=3)])
def test_every_shape_of_steps_reads_the_text_itself(target: Path, shape: Shape) -> None:
    """Whatever the target would choose: the logits are those of a plain forward pass over the text."""
    reader, some = StepReader(target, "float32"), texts(3)
    plain = [reader.model.linear_logits([*prompt, *output])[len(prompt) - 1 : -1] for prompt, output in some]
    assert torch.allclose(reader.logits(some, shape), torch.cat(plain), atol=1e-4)


def test_in_float32_no_shape_of_steps_flips_a_token(target: Path) -> None:
    rows = lossless.flips(StepReader(target, "float32"), texts(3))
    assert [row["steps"] for row in rows] == [shape.name for shape in SHAPES]
    assert all(row["tokens"] == 63 and row["flips"] == 0 and row["gap_most"] is None for row in rows)


def test_a_flip_has_the_gap_that_it_overcame_and_moves_probability() -> None:
    logits, others = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert flipped(logits, others) == [1.0]
    assert probability_moved(logits, others) == pytest.approx(0.7311 - 0.2689, abs=1e-3)


def test_samples_of_one_distribution_are_alike_and_of_two_are_not() -> None:
    rng = random.Random(0)

    def sample(weights: tuple[int, ...]) -> Counter[tuple[int, ...]]:
        return Counter((drawn,) for drawn in rng.choices(range(len(weights)), weights, k=600))

    statistic, freedom = lossless.homogeneity([(sample((5, 3, 1, 1)), sample((5, 3, 1, 1)))] * 2)
    assert freedom == 6 and statistic < 17.0
    statistic, freedom = lossless.homogeneity([(sample((5, 3, 1, 1)), sample((4, 3, 2, 1)))])
    assert freedom == 3 and statistic > 12.0
    assert lossless.homogeneity([(Counter({(1,): 9}), Counter({(1,): 9}))]) == (0.0, 0)
