"""The distillation loop's metrics: where it is, by its own state. docs/metrics.md lists all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.loop import Loop
from cloud_verifier.distill.state import Result, Stage
from outrider.telemetry.prometheus import counter, gauge, one_of

WATCHING = "watching"
NONE = "none"


class DistillCollector(Collector):
    def __init__(self, loop: Loop, config: DistillConfig) -> None:
        self._loop = loop
        self._config = config

    def collect(self) -> Iterator[Metric]:
        name, loop, state = "outrider_distill", self._loop, self._loop.state
        yield gauge(f"{name}_run_number", "Of the last run that was begun", state.last)
        stage = one_of(state.run.stage if state.run else WATCHING, (WATCHING, *get_args(Stage)))
        yield gauge(f"{name}_stage", "1 for where the loop is, 0 for the others", stage, "stage")
        failures = state.run.failures if state.run else 0
        yield gauge(f"{name}_stage_failures", "Of the present stage, in a row", failures)
        yield counter(f"{name}_failures", "Of stages, and of watching, since the process began", loop.failures)
        text = "That stages have taken since the process began"
        yield counter(f"{name}_stage_seconds", text, {**loop.stage_s}, "stage")
        yield gauge(f"{name}_spent_seconds", "That stages took within the last day", loop.spent_s)
        budget = 60 * self._config.daily_minutes
        yield gauge(f"{name}_budget_seconds", "That they may take in a day", budget)
        yield counter(f"{name}_runs", "Runs that ended since the process began", {**loop.results}, "result")
        last = state.history[-1] if state.history else None
        results = one_of(last.result if last else NONE, (NONE, *get_args(Result)))
        yield gauge(f"{name}_last_result", "1 for what came of the last run that ended", results, "result")
        age = time.time() - last.ended_unix if last else None
        yield gauge(f"{name}_last_run_age_seconds", "Since the last run ended", age)
