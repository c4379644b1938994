"""Read the metrics that processes export, and the names in documents."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from cloud_verifier.config import VerifierConfig
from cloud_verifier.distill.metrics import DistillCollector
from cloud_verifier.front.metrics import VerifierCollector
from cloud_verifier.front.service import VerifierService
from coordinator.api.metrics import CoordinatorCollector, CoordinatorCounters
from coordinator.store.redis_store import RedisStore
from edge_agent.metrics import EdgeMetrics
from outrider.telemetry.prometheus import registry
from outrider.wire.v1 import engine_pb2


@dataclass(frozen=True)
class Family:
    """Hold one metric. name: as a sample of it is written, for a histogram without its suffix."""

    name: str
    kind: str
    labels: tuple[str, ...]

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names by which PromQL finds it."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


def collectors() -> dict[str, Any]:
    """Return each process's collector, of a process that has just begun."""
    host = types.SimpleNamespace(stats=engine_pb2.EngineStats(), ended=asyncio.Event())
    loop = types.SimpleNamespace(runs=[], run=None, stage_s={}, results={}, failures=0)
    service = VerifierService(VerifierConfig(model=Path("m")), host, "v")  # type: ignore[arg-type]
    return {
        "verifier": VerifierCollector(host, service),  # type: ignore[arg-type]
        "coordinator": CoordinatorCollector(CoordinatorCounters(RedisStore("redis://nowhere")), None, None),  # type: ignore[arg-type]
        "device": EdgeMetrics(),
        "distillation": DistillCollector(loop),  # type: ignore[arg-type]
    }


def families(metrics: Iterable[Any]) -> Iterator[Family]:
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = metric._labelnames if hasattr(metric, "_labelnames") else metric.samples[0].labels
        yield Family(name, metric.type, tuple(labels))


def exported() -> dict[str, list[Family]]:
    """Return process -> the metrics that a new one exports, with the build, which every process exports."""
    build = next(m for m in registry(EdgeMetrics()).collect() if m.name == "outrider_build_info")
    found = {process: list(families(collector.collect())) for process, collector in collectors().items()}
    return {"every process": list(families([build])), **found}


_PROMQL = {
    *("sum", "max", "min", "avg", "count", "by", "without", "on", "ignoring", "group_left", "group_right"),
    *("and", "or", "unless", "bool", "offset", "rate", "increase", "delta", "histogram_quantile", "up"),
}


def names_used(expression: str) -> set[str]:
    """Return the metrics of a PromQL expression: every word that is no part of the language, no label and no value."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\boffset\s+\w+", "", bare)
    return {word for word in re.findall(r"(?<![\w.$])[A-Za-z_:][\w:]*", bare) if word.lower() not in _PROMQL}


def labels_used(expression: str) -> set[tuple[str, str]]:
    """Return (metric, label) of every matcher in a PromQL expression."""
    return {
        (name, label)
        for name, matchers in re.findall(r"([A-Za-z_:][\w:]*)\{([^}]*)\}", expression)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers))
    }
