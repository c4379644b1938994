"""Give every test of the contract an engine of each kind that this environment has."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
from engine_builds import BUILDS, COHORTS, CONFIG, Build, grammars_for
from late_target import always_in_cohorts
from served_devices import Served

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine


@pytest.fixture(params=list(BUILDS))
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a function that makes an executor of one kind; skips a kind that is not installed here."""
    kind: str = request.param
    if kind == "vllm" and "OUTRIDER_REQUIRE_VLLM" not in os.environ and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment; make test-vllm has one")
    if kind != "vllm" and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("this environment is vLLM's; our own backend is tested where its versions are")
    if kind == COHORTS:
        always_in_cohorts(monkeypatch)
    return BUILDS[kind]


@pytest.fixture
def serve(build: Build) -> Iterator[Callable[..., Served]]:
    """Return a function that makes an engine with a configuration and connects it to devices.

    Sessions that a test leaves alive are stopped: the next engine may have the same core of vLLM.
    """
    made: list[Served] = []

    def make(config: EngineConfig = CONFIG) -> Served:
        executor = build(config)
        made.append(Served(Engine(executor, config, grammars=grammars_for(executor))))
        return made[-1]

    yield make
    for served in made:
        for name in served.devices:
            served.engine.stop(name)
