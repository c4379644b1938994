"""Export the distillation loop's metrics, which follow from its state; docs/metrics.md lists them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.run_folder import Result, Stage
from outrider.telemetry.prometheus import counter, gauge, one_of


class DistillCollector(Collector):
    """Reads the loop at each scrape."""

    def __init__(self, loop: DistillLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        name, loop, runs = "outrider_distill", self._loop, self._loop.runs
        run, ended = loop.run, [outcome for one in runs if (outcome := one.outcome) is not None]
        last = ended[-1] if ended else None
        yield gauge(f"{name}_run_number", "Number of the last run that was begun", runs[-1].number if runs else 0)
        stages = one_of((run and run.stage) or "watching", ("watching", *get_args(Stage)))
        yield gauge(f"{name}_stage", "1 for the loop's present stage, 0 for the others", stages, "stage")
        yield gauge(f"{name}_stage_failures", "Failures of the present stage in a row", run.failures if run else 0)
        yield counter(f"{name}_failures", "Failures of stages and of watching since the process began", loop.failures)
        text = "Seconds that stages have taken since the process began"
        yield counter(f"{name}_stage_seconds", text, {**loop.stage_s}, "stage")
        yield counter(f"{name}_runs", "Runs that ended since the process began", {**loop.results}, "result")
        results = one_of(last.result if last else "none", ("none", *get_args(Result)))
        yield gauge(f"{name}_last_result", "1 for the result of the last run that ended", results, "result")
        age_s = time.time() - last.ended_unix if last else None
        yield gauge(f"{name}_last_run_age_seconds", "Seconds since the last run ended", age_s)
