"""Have an executor compute each step as late as a GPU may, and an engine step in two cohorts whenever it can."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cloud_verifier.engine.interface import Completion, Lap, SessionRows
from cloud_verifier.engine.step_profiler import StepProfiler
from cloud_verifier.engine.torch_backend.executor import TorchExecutor


class OverlappingExecutor(TorchExecutor):
    """Computes a step when it is launched, as early as can be."""

    overlaps = True  # type: ignore[assignment]


class LateExecutor(OverlappingExecutor):
    """Computes a step when it is completed: the next one is prepared by then, and the one before is committed."""

    def launch(self, rows: Sequence[SessionRows], lap: Lap) -> Completion:
        launch = super().launch
        return lambda later: launch(rows, lap)(later)


def always_in_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every engine whose executor overlaps steps use two cohorts as soon as there are two sessions."""
    monkeypatch.setattr(StepProfiler, "cohorts_pay", lambda self, sessions: sessions > 1)
