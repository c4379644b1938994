"""Build executors of each kind, and load each target once."""

from __future__ import annotations

import os
from collections.abc import Callable

from small_pair import TARGET

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import TargetExecutor
from cloud_verifier.engine.vllm_backend import ENVIRONMENT
from outrider.core.constraint import Grammars, grammars_of

CONFIG = EngineConfig(kv_slots=8_192, token_budget=128, max_sessions=16)
NODES = 8
"""The most nodes of a session in a step, by vLLM's settings; the other engines take as many as are granted."""

COHORTS = "torch, two cohorts"
Build = Callable[[EngineConfig], TargetExecutor]


def _torch(config: EngineConfig) -> TargetExecutor:
    from cloud_verifier.engine.torch_backend.executor import TorchExecutor
    from cloud_verifier.engine.torch_backend.model import TargetModel
    from cloud_verifier.engine.torch_backend.numerics_check import check_numerics

    if "torch" not in _LOADED:
        _LOADED["torch"] = TargetModel.load(TARGET, dtype="float32")
        check_numerics(_LOADED["torch"])
    return TorchExecutor(_LOADED["torch"], config)


def _cohorts(config: EngineConfig) -> TargetExecutor:
    from late_target import LateExecutor

    return LateExecutor(_torch(config).model, config)


def _vllm(config: EngineConfig) -> TargetExecutor:
    os.environ.update(ENVIRONMENT | os.environ)
    from cloud_verifier.engine.vllm_backend import load
    from cloud_verifier.engine.vllm_backend.executor import VllmExecutor

    key = f"vllm {config.kv_slots}"
    if key not in _LOADED:
        for old in [name for name in _LOADED if name.startswith("vllm")]:
            _LOADED.pop(old).shutdown()
        _LOADED[key] = load.engine_core(TARGET, config, dtype="float32", nodes=NODES)
    core = _LOADED[key]
    return VllmExecutor(core, config, label="target", eos_token_ids=load.eos_token_ids(core))


def grammars_for(executor: TargetExecutor) -> Grammars:
    """Return the grammars of an executor's target."""
    return grammars_of(TARGET / "tokenizer.json", executor.capabilities.vocabulary, executor.eos_token_ids)


_LOADED: dict[str, object] = {}
BUILDS: dict[str, Build] = {"torch": _torch, COHORTS: _cohorts, "vllm": _vllm}
