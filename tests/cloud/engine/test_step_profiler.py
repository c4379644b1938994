"""Test the costs of steps that are measured when a target is loaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cloud_verifier.engine import step_profiler as profiling
from cloud_verifier.engine.torch_backend.executor import profile
from cloud_verifier.engine.torch_backend.model import TargetModel


class Slow:
    """Simulate the time of a slow machine: so many seconds for a pass, and so many for each of its rows."""

    def __init__(self, base: float, per_row: float) -> None:
        self.now = 0.0
        self.passes: list[int] = []
        self._base, self._per_row = base, per_row

    def __call__(self) -> float:
        return self.now

    def works(self, rows: int) -> None:
        self.passes.append(rows)
        self.now += self._base + self._per_row * rows


@pytest.fixture
def slowed(target: Callable[[str], TargetModel], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Slow]:
    """Make the tiny target's passes take their time on a clock of their own."""

    def slow(base: float, per_row: float) -> Slow:
        clock = Slow(base, per_row)
        forward = TargetModel.forward

        def slower(model: TargetModel, batch: object, plan: object) -> torch.Tensor:
            clock.works(batch.input_ids.shape[1])  # type: ignore[attr-defined]
            return forward(model, batch, plan)  # type: ignore[arg-type]

        monkeypatch.setattr(TargetModel, "forward", slower)
        return clock

    return slow


def test_the_curve_is_what_the_passes_took(target: Callable[[str], TargetModel], slowed: Callable[..., Slow]) -> None:
    clock = slowed(0.010, 0.001)
    cost = profile(target("llama"), 64, clock=clock)
    for rows in (1, 8, 32, 64, 100):
        assert cost.seconds(rows, 1) == pytest.approx(0.010 + 0.001 * rows, rel=0.01)
    assert max(clock.passes) == 64


def test_on_a_slow_machine_it_keeps_to_its_time_and_prolongs_the_line(
    target: Callable[[str], TargetModel], slowed: Callable[..., Slow]
) -> None:
    clock = slowed(0.5, 0.05)
    cost = profile(target("llama"), 512, clock=clock)
    assert clock.now <= profiling.LIMIT_S + 1.0
    assert max(clock.passes) < 64
    assert cost.seconds(256, 1) == pytest.approx(0.5 + 0.05 * 256, rel=0.05)
