"""Test two drafts on llama.cpp at once: both propose, the output stays, and one that fails leaves the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier
from tiny_gguf import write_tiny_llama

from edge_agent import AsyncClient
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.pool import DraftOptions, DraftPool, LoadedModel
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.errors import ModelRefused
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT
from outrider.core.vocabulary import token_table

MODELS = Path(__file__).parents[2] / "models"
PLAN = SpeculationPlan(nodes=48, depth=16, nodes_per_step=12, min_acceptance=0.1, draft_wait_s=0.008, step_s=0.05)
SAMPLED = SamplingParams(temperature=0.8, seed=11)
PROMPT = tuple(b"def f(x):\n    return x")
TOKENS = 120


@pytest.fixture(scope="module")
def second_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another random draft with the vocabulary of the first."""
    return write_tiny_llama(tmp_path_factory.mktemp("second") / "second.gguf", seed=7)


def learned(loaded: LoadedModel) -> float:
    """Return how many of the model's proposals were judged."""
    return sum(calibrator.observations for calibrator in loaded.calibrators)


async def test_two_drafts_propose_together_and_the_output_stays(
    verifier: FakeVerifier, tiny_gguf: Path, second_gguf: Path, tmp_path: Path
) -> None:
    options = {"max_tokens": 60, "temperature": 0.8, "seed": 3}
    outputs = []
    for draft in (None, [tiny_gguf, second_gguf], [second_gguf, tiny_gguf]):
        async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=draft) as client:
            completion = await client.generate("x = ", **options)  # type: ignore[arg-type]
            outputs.append(completion.token_ids)
            if draft is not None:
                pool = (await client.prepare()).drafts
                assert pool is not None and completion.statistics.draft == " + ".join(path.name for path in draft)
                assert completion.statistics.draft_failure == "" and completion.statistics.drafted > 0
                assert len(pool._models) == 2 and all(learned(loaded) > 0 for loaded in pool._models)
    assert outputs[0] == outputs[1] == outputs[2]


@contextlib.asynccontextmanager
async def pool_of(*names: str) -> AsyncIterator[DraftPool]:
    table = token_table(await asyncio.to_thread((MODELS / "target" / "tokenizer.json").read_bytes))
    pool = await DraftPool.load([MODELS / name for name in names], "", table, DraftOptions(workers=1))
    try:
        yield pool
    finally:
        await pool.close()


async def written_alone(name: str) -> list[int]:
    """Return what a draft writes alone: a target that this draft knows and the other does not."""
    async with pool_of(name) as pool:
        task = DraftTask(PROMPT, sampling=SAMPLED, max_tokens=TOKENS)
        return [delivery.tokens[0] async for delivery in pool.generate_offline(task, lambda: None)]


async def steps(text: Sequence[int], *names: str) -> int:
    """Return the steps in which the drafts, without n-grams, get through the text."""
    async with pool_of(*names) as pool:
        with contextlib.ExitStack() as owned:
            drafter = Drafter([pool._calibrated(loaded, owned) for loaded in pool._models])
            drafter.begin(DraftTask(PROMPT, sampling=SAMPLED, max_tokens=10_000), PLAN)
            done = count = 0
            while done < len(text):
                while drafter.step():
                    pass
                at, end = ROOT, done
                while end < len(text) and (child := drafter._tree.child(at, text[end])) is not None:
                    at, end = child, end + 1
                drafter.advance(text[done : end + 1])
                done, count = end + 1, count + 1
        assert len(names) == 1 or all(learned(loaded) > 0 for loaded in pool._models)
        return count


async def test_a_second_draft_that_knows_the_text_better_takes_steps_away() -> None:
    text = await written_alone("draft-narrow.gguf")
    both = await steps(text, "draft.gguf", "draft-narrow.gguf")
    assert both < 0.9 * await steps(text, "draft.gguf")


async def test_a_draft_that_is_refused_is_left_out(
    verifier: FakeVerifier, tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.gguf"
    await asyncio.to_thread(broken.write_bytes, b"GGUF and nothing else")
    for draft in ([broken, tiny_gguf], [tiny_gguf, broken]):
        async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=draft) as client:
            completion = await client.generate("x", max_tokens=20)
        assert completion.statistics.draft == tiny_gguf.name and completion.statistics.draft_failure == ""
    assert sum("broken.gguf is left out" in line for line in caplog.messages) == 2
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=[broken, broken]) as client:
        with pytest.raises(ModelRefused, match=r"broken\.gguf"):
            await client.generate("x", max_tokens=20)
