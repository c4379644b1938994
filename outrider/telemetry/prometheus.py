"""Turn plain counts into Prometheus' metric families; a scrape reads the numbers that the process keeps anyway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider import __version__
from outrider.core.histogram import Histogram

Labelled = Mapping[str, float] | Mapping[tuple[str, str], float]
"""Label values -> number. They must be few, so no label is text that a client or a tenant has written."""


def counter(name: str, text: str, value: float | Labelled, *labels: str) -> Metric:
    """Return a counter. name: without `_total`, which the text format adds."""
    return _filled(CounterMetricFamily(name, text, labels=labels), value)


def gauge(name: str, text: str, value: float | Labelled | None, *labels: str) -> Metric:
    """Return a gauge. value: None, if it is not known, exports the name alone."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), {} if value is None else value)


def histogram(
    name: str,
    text: str,
    value: Histogram | Mapping[str, Histogram] | Mapping[tuple[str, ...], Histogram],
    *labels: str,
) -> Metric:
    """Return a histogram, or one for each value of the labels."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for label, one in {(): value}.items() if isinstance(value, Histogram) else value.items():
        bounds = [*map(str, one.bounds), "+Inf"]
        family.add_metric(
            (label,) if isinstance(label, str) else label,
            list(zip(bounds, accumulate(one.counts), strict=True)),
            one.sum,
        )
    return family


def one_of(value: str, states: Iterable[str]) -> dict[str, float]:
    """Return 1 for the state that something is in, 0 for all others."""
    return {state: float(state == value) for state in states}


def registry(collector: Collector) -> CollectorRegistry:
    """Return the registry of a process: its collector, its version, its CPU and memory."""
    own = CollectorRegistry()
    Gauge("outrider_build_info", "Always 1", ["version"], registry=own).labels(__version__).set(1)
    own.register(collector)
    ProcessCollector(registry=own)
    return own


def _filled(family: CounterMetricFamily | GaugeMetricFamily, value: float | Labelled) -> Metric:
    if isinstance(value, Mapping):
        for label, number in value.items():
            family.add_metric((label,) if isinstance(label, str) else label, number)
    else:
        family.add_metric((), value)
    return family
