"""Have an executor compute each step as late as a GPU may, and an engine step in two cohorts whenever it can."""

from __future__ import annotations

from typing import TypeVar

import pytest

from cloud_verifier.engine.interface import TargetExecutor
from cloud_verifier.engine.step_profiler import StepProfiler

_Executor = TypeVar("_Executor", bound=TargetExecutor)


def compute_late(executor: _Executor) -> _Executor:
    """Return the executor, whose steps are computed when they are completed: the next one is prepared by then, and the
    one before is committed."""
    launch = executor.launch
    executor.launch = lambda rows, lap: lambda later: launch(rows, lap)(later)  # type: ignore[method-assign]
    executor.overlaps = True
    return executor


def always_in_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every engine whose executor overlaps steps use two cohorts as soon as there are two sessions."""
    monkeypatch.setattr(StepProfiler, "cohorts_pay", lambda self, sessions: sessions > 1)
