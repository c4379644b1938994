"""Test devices without a draft model: n-grams draft, and statistics and metrics say so by name."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import VOCABULARY, target, tokenizer_json

from tools.install import NEEDS_LLAMA, ROOT

TOKENS = 48
PERIOD = 6

WITHOUT_LLAMA_CPP = """
import asyncio, json, sys
sys.modules["llama_cpp"] = None  # an import of it raises ImportError
from edge_agent import AsyncClient, EdgeSettings

async def main():
    settings = EdgeSettings()
    async with AsyncClient(verifier=sys.argv[1], cache_dir=sys.argv[2], settings=settings) as client:
        completion = await client.generate([1, 2, 3], max_tokens=int(sys.argv[3]))
        print(json.dumps({
            "tokens": list(completion.token_ids),
            "draft": completion.statistics.draft,
            "accepted": completion.statistics.accepted,
            "metrics": client.metrics.render().decode(),
        }))

asyncio.run(main())
"""


def repeating(sequence: object) -> int:
    """Return the next token of a target that says the same six tokens again and again."""
    return target((1, 2, 3, len(sequence) % PERIOD))  # type: ignore[arg-type]


@pytest.fixture
async def verifier(tiny_gguf: Path) -> AsyncIterator[FakeVerifier]:
    draft = await asyncio.to_thread(tiny_gguf.read_bytes)
    script = Script(
        repeating, vocabulary_size=VOCABULARY + 300, tokenizer_json=tokenizer_json(), artifacts={"draft": draft}
    )
    async with FakeVerifier(script) as running:
        yield running


def drafted_requests(metrics: str) -> dict[str, float]:
    lines = [line for line in metrics.splitlines() if line.startswith("outrider_edge_drafted_requests_total")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def test_without_llama_cpp_n_grams_draft_and_no_draft_is_fetched(verifier: FakeVerifier, tmp_path: Path) -> None:
    tokens = 6 * TOKENS  # a device that waits for its core drafts nothing meanwhile
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WITHOUT_LLAMA_CPP, verifier.address, str(tmp_path), str(tokens), stdout=-1, stderr=-1
    )
    out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err.decode()
    said = json.loads(out)
    expected = [repeating(range(3 + i)) for i in range(tokens)]
    assert said["tokens"] == expected
    assert said["draft"] == "ngram" and said["accepted"] > TOKENS
    assert drafted_requests(said["metrics"]) == {"model": 0.0, "ngram": 1.0, "none": 0.0}
    assert len({digest for digest, _ in verifier.fetches}) == 1  # the tokenizer


def test_the_extra_for_devices_without_a_model_is_that_of_devices_less_llama_cpp() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    edge, lite = extras["edge"], extras["edge-lite"]
    assert edge == ["outrider[edge-lite]", next(one for one in edge if one.startswith("llama-cpp-python"))]
    assert not any("llama-cpp-python" in one for one in lite) and any("tokenizers" in one for one in lite)
    assert "edge" in NEEDS_LLAMA and "edge-lite" not in NEEDS_LLAMA
