"""Test a verifier whose engine process runs vLLM in another interpreter, and failover between it and our own engine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from system import QUICK, ROOT, Device, System
from target_reference import TargetReference
from transformers import AutoTokenizer

PYTHON = os.environ.get("OUTRIDER_VLLM_PYTHON", "")
VLLM = ("--engine", "vllm", "--engine-python", PYTHON)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: make test-vllm"),
]
CODE = 'def read_lines(path):\n    """Return the lines of a file."""\n'
TOKENS = 48
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> AsyncIterator[System]:
    async with System(tmp_path_factory.mktemp("vllm"), pair, *VLLM, count=1) as running:
        yield running


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_text_is_the_targets_own_with_a_draft_and_without(
    vllm: System, device: Device, pair: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    options = {"max_tokens": TOKENS, **settings}
    drafted = await device.run(vllm.here, CODE, **options)
    streamed = await device.run({**vllm.here, "draft": None}, CODE, **options)
    assert drafted["tokens"] == streamed["tokens"]
    assert drafted["steps"] < TOKENS and streamed["steps"] <= TOKENS
    assert streamed["evaluated"] == 0 < drafted["evaluated"]
    ids = AutoTokenizer.from_pretrained(pair[0]).encode(CODE, add_special_tokens=False)
    assert TargetReference(str(pair[0])).mismatches(ids, drafted["tokens"], settings, TOKENS) == []


@pytest.mark.parametrize("first", ["vllm", "torch"])
async def test_a_session_goes_on_at_the_other_engine_with_the_same_tokens(
    vllm: System, device: Device, pair: tuple[Path, Path], first: str
) -> None:
    """The tokens are equal but for ties, since the two engines' logits differ in their last bits."""
    models = ("--model", str(pair[0]), "--draft", str(pair[1]), *QUICK)
    expected = (await device.run(vllm.here, CODE, max_tokens=TOKENS, **SAMPLED))["tokens"]
    [serving] = [child for child in vllm.cluster.verifiers if child.running]
    other = await vllm.cluster.start_verifier(*models, *(VLLM if first == "torch" else ()))
    for _ in range(20):  # the coordinator chooses
        running = await device.begin({**vllm.here, "draft": None}, CODE, max_tokens=TOKENS, **SAMPLED)
        await running.until_tokens(4)
        if running.attaches == [serving.address]:
            break
        await running.done()
    await serving.kill()
    done = await running.done()
    assert (running.attaches[0], running.attaches[-1]) == (serving.address, other.address)
    assert done["tokens"] == expected


async def test_an_environment_without_vllm_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cloud_verifier.app", "--model", str(pair[0])),
        *("--engine", "vllm", "--engine-python", sys.executable),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode
    assert b"python -m cloud_verifier.vllm_environment FOLDER" in said
