"""Give every test of the contract an engine of each kind that this environment has."""

from __future__ import annotations

import importlib.util
import os

import pytest
from engine_builds import BUILDS, Build


@pytest.fixture(params=list(BUILDS))
def build(request: pytest.FixtureRequest) -> Build:
    """Return a function that makes an executor of one kind; skips a kind that is not installed here."""
    kind: str = request.param
    if kind == "vllm" and "OUTRIDER_REQUIRE_VLLM" not in os.environ and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment; make test-vllm has one")
    if kind == "torch" and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("this environment is vLLM's; our own backend is tested where its versions are")
    return BUILDS[kind]
