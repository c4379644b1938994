"""Test one turn of the loop with real stages: on made-up traffic the narrow draft learns sums."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from loop_fakes import CANARY, SIGNER, FakeReleases
from small_pair import NARROW, TARGET
from tokenizers import Tokenizer

from cloud_verifier.distill.config import DistillConfig, GateRule
from cloud_verifier.distill.loop import DistillLoop, target_hashes
from cloud_verifier.distill.publisher import Publisher
from cloud_verifier.traffic.log import TrafficLog
from cloud_verifier.traffic.passage import Passage
from outrider.artifacts.store import ArtifactStore
from outrider.llama import LlamaModel
from outrider.wire.manifest import name_of, read_unverified

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Ida")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "toys")
SESSIONS = 240


def sum_of(rng: random.Random) -> str:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 60), rng.randint(2, 60)
    return (
        f"Question: {name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?\n"
        f"Answer: {name} has {a} + {b} = {a + b} {thing}.\nThe answer is {a + b}.\n"
    )


def record(folder: Path, weights_hash: str) -> int:
    """Record sessions of sums, each token all but certain; return the number of tokens."""
    rng, chance, tokens = random.Random(5), np.random.default_rng(5), 0
    passages: list[Passage] = []
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for session in range(SESSIONS):
        ids = np.array(tokenizer.encode(sum_of(rng), add_special_tokens=False).ids, np.int32)
        top = chance.integers(0, tokenizer.get_vocab_size(), (len(ids), 8)).astype(np.int32)
        top[:, 0] = ids
        log_probs = np.tile(np.log([0.93] + [0.009] * 7), (len(ids), 1)).astype(np.float32)
        now, n = time.time(), len(ids)
        tail, depths = np.full(n, 0.007, np.float32), np.zeros(n, np.uint8)
        passages.append(
            Passage(
                *(f"session-{session}", f"tenant-{session % 4}", "sums", "", weights_hash, 0),
                *(ids, top, log_probs, tail, depths, 0.0, now, now + 86_400.0),
            )
        )
        tokens += n
    TrafficLog(str(folder)).write(passages)
    return tokens


@pytest.mark.nightly("the contract's tests take a turn daily")
async def test_the_narrow_draft_learns_sums_and_the_gate_lets_it_pass(tmp_path: Path) -> None:
    hashes = target_hashes(TARGET)
    tokens = record(tmp_path / "traffic", hashes.weights_hash)
    config = DistillConfig(
        traffic=str(tmp_path / "traffic"),
        target=TARGET,
        draft=NARROW,
        artifacts=tmp_path / "artifacts",
        state_dir=tmp_path / "state",
        fresh_tokens=tokens,
        gate=GateRule(slower=100.0),  # whatever the machine does besides
        training_options={"steps": 40, "batch_tokens": 1_024, "micro_tokens": 1_024, "precision": "float32"},
    )
    releases = FakeReleases()
    artifacts = ArtifactStore(config.artifacts, ".gguf")
    publisher = Publisher(releases, config.state / "releases", artifacts, SIGNER, hashes)
    loop = DistillLoop(config, hashes, publisher, TrafficLog(config.traffic))

    assert await loop.once() is None, [run.outcome for run in loop.runs]
    assert releases.states == {1: CANARY}
    manifest = read_unverified(next(iter(releases.known.values())).manifest)
    assert manifest.metrics["gain.fresh"] > 0.1
    assert manifest.metrics["acceptance.sums"] > 0.6
    verdict = json.loads((config.state / "runs" / "1" / "gate.json").read_text())
    assert verdict["passed"] and verdict["groups"][0]["sessions"] >= config.gate.sessions
    released = config.artifacts / f"{name_of(manifest)}.gguf"
    LlamaModel.load(released).close()
    assert GGUFReader(released).fields["general.architecture"].contents() == "qwen3"
