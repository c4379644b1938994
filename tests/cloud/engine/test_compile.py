"""Test that compiled layers give the logits of those that are not compiled, and are used only where that is faster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_targets import make_tiny

from cloud_verifier.engine.torch_backend import executor
from cloud_verifier.engine.torch_backend.executor import compile_if_faster
from cloud_verifier.engine.torch_backend.kernels import linear
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import FLOAT32_BOUND, check_numerics


def steps_take(monkeypatch: pytest.MonkeyPatch, *, compiled: float) -> None:
    """Let steps run, but take 1 second, or `compiled` seconds once the model is compiled."""
    timed_steps = executor.timed_steps

    def timed(model: TargetModel, *arguments: Any) -> Any:
        run = timed_steps(model, *arguments)

        def seconds(counts: Sequence[int]) -> float:
            run(counts)
            return compiled if model.compiled else 1.0

        return seconds

    monkeypatch.setattr(executor, "timed_steps", timed)


@pytest.mark.parametrize(
    "packed",
    [pytest.param(True, marks=pytest.mark.skipif(not os.environ.get("OUTRIDER_NIGHTLY"), reason="nightly")), False],
)
def test_compiled_layers_pass_the_numerics_check_against_plain_ones(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    steps_take(monkeypatch, compiled=0.5)
    if not packed:
        monkeypatch.setattr(linear, "_pack", None)
    model = TargetModel(make_tiny("gemma2"), name="tiny")  # with windows and softcap
    ids = list(range(3, 40))
    plain = model.linear_logits(ids)
    assert compile_if_faster(model) == "the target is compiled: steps take 0.50 of the time"
    assert model.backend.endswith("+compiled")
    with torch._dynamo.config.patch(error_on_recompile=True):  # steps of every size run the same code
        assert check_numerics(model) <= FLOAT32_BOUND
        executor.profile(model, rows=2)  # begins with one session and one row
    assert torch.equal(model.linear_logits(ids), plain)  # the reference is not compiled


def test_layers_that_are_no_faster_compiled_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_take(monkeypatch, compiled=1.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = TargetModel(make_tiny("llama"), name="tiny")
    assert compile_if_faster(model) == "the target is not compiled: steps take 1.00 of the time with it"
    assert not model.compiled
    assert "forward" not in vars(model.module.base_model)


def test_a_machine_that_cannot_compile_serves_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no C++ compiler\nmore")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    model = TargetModel(make_tiny("llama"), name="tiny")
    assert compile_if_faster(model) == "the target is not compiled: RuntimeError: no C++ compiler"
    assert not model.compiled
    assert check_numerics(model) <= FLOAT32_BOUND
