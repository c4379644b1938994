"""Test two drafts on llama.cpp at once: both propose, the output stays, and one that is refused leaves the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier
from tiny_gguf import write_tiny_llama

from edge_agent import AsyncClient
from edge_agent.drafting.loading import LoadedModel
from outrider.core.errors import ModelRefused


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
                loaded = (await client.prepare()).draft
                assert loaded is not None and completion.statistics.draft == " + ".join(path.name for path in draft)
                assert completion.statistics.draft_failure == "" and completion.statistics.drafted > 0
                assert len(loaded.models) == 2 and all(learned(one) > 0 for one in loaded.models)
    assert outputs[0] == outputs[1] == outputs[2]


async def test_a_draft_that_is_refused_is_left_out(
    verifier: FakeVerifier, tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.gguf"
    await asyncio.to_thread(broken.write_bytes, b"GGUF and nothing else")
    for draft in ([broken, tiny_gguf], [tiny_gguf, broken]):
        async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=draft) as client:
            completion = await client.generate("x", max_tokens=20)
        assert completion.statistics.draft == tiny_gguf.name
        assert completion.statistics.draft_failure.startswith("the draft broken.gguf is left out: ")
    assert sum("broken.gguf is left out" in line for line in caplog.messages) == 2
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=[broken, broken]) as client:
        with pytest.raises(ModelRefused, match=r"broken\.gguf"):
            await client.generate("x", max_tokens=20)
