"""Test a verifier whose engine process runs vLLM in another interpreter, and failover between it and our own engine."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from shared_cluster import Cluster, Program, until
from small_pair import TARGET

if TYPE_CHECKING:
    from independent_reference import Reference

    from edge_agent import Client

PYTHON = os.environ.get("OUTRIDER_VLLM_PYTHON", "")
VLLM = ("--engine", "vllm", "--engine-python", PYTHON)
needs_vllm = pytest.mark.skipif(not PYTHON, reason="needs vLLM: make test-vllm")
CODE = 'def read_lines(path):\n    """Return the lines of a file."""\n'
TOKENS = 48
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}


@pytest.fixture
def vllm(cluster: Cluster) -> Iterator[Program]:
    """Return a verifier of the cluster that runs vLLM, and keep sessions off the others."""
    with cluster.verifier("--verifier-id", "vllm", *VLLM) as program, cluster.cordoned("verifier-1", "verifier-2"):
        yield program


@needs_vllm
def test_text_is_the_targets_own_with_a_draft_and_without(
    cluster: Cluster, vllm: Program, reference: Reference
) -> None:
    from independent_reference import Sampling

    settings: list[dict[str, Any]] = [{}, SAMPLED]
    for sampling, draft in itertools.product(settings, ("auto", None)):
        with cluster.client(draft=draft) as client:

            def evaluated(sampling: dict[str, Any] = sampling, client: Client = client) -> int:
                """Ask for a text and compare it; return how many of the draft's tokens vLLM evaluated for it."""
                got = client.generate(CODE, max_tokens=TOKENS, ignore_eos=True, **sampling)
                assert got.statistics.address == vllm.ready
                assert reference.differences(reference.ids(CODE), got.token_ids, Sampling(**sampling)) == []
                return got.statistics.evaluated

            if draft is None:
                assert evaluated() == 0
            else:
                until(evaluated)  # the first text may be over before the draft is loaded


@needs_vllm
@pytest.mark.nightly("it starts four verifiers")
@pytest.mark.parametrize("first", ["vllm", "torch"])
def test_a_session_goes_on_at_the_other_engine_with_the_same_tokens(cluster: Cluster, first: str) -> None:
    """The tokens are equal but for ties, since the two engines' logits differ in their last bits."""
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, **SAMPLED}
    with (
        cluster.client(draft=None) as client,
        cluster.verifier("--verifier-id", "vllm", *VLLM) as vllm,
        cluster.verifier("--verifier-id", "torch") as torch,
    ):
        expected = client.generate(CODE, **options).token_ids
        leaving, other = (vllm, torch) if first == "vllm" else (torch, vllm)
        with cluster.cordoned("verifier-1", "verifier-2"):
            with cluster.cordoned("torch" if first == "vllm" else "vllm"):
                stream = client.stream(CODE, **options)
                assert stream.next() and stream.statistics.address == leaving.ready
                leaving.signal(signal.SIGKILL)  # at once, since a command takes longer than the text
            assert stream.drain().token_ids == expected
        assert stream.statistics.address == other.ready


def test_an_environment_without_vllm_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    command = ("outrider-verifier", "--model", TARGET, "--engine", "vllm", "--engine-python", sys.executable)
    code, _, said = Cluster(tmp_path, "", None).run(*command)  # type: ignore[arg-type]
    assert code and "python -m cloud_verifier.vllm_environment FOLDER" in said
