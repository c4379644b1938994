"""Add up a device's metrics from its requests' own statistics whenever they are scraped.

Nothing is counted twice, and nothing while a token is delivered: the statistics of a running request are read as they
are, and those of one that has ended are added to sums. docs/metrics.md lists all metrics.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from edge_agent.drafting.loading import NGRAM
from edge_agent.session.statistics import Statistics
from outrider.core.errors import OutriderError
from outrider.core.histogram import STEP_S, WAIT_S, Histogram
from outrider.core.sampling import RULES
from outrider.telemetry.prometheus import counter, gauge, histogram, registry

_PREFIX = "outrider_edge_"

_COUNTERS: Mapping[str, tuple[str, Callable[[Statistics], int]]] = {
    "spec_decode_num_draft_tokens": ("Nodes sent", lambda one: one.drafted),
    "spec_decode_num_evaluated_tokens": ("Nodes that the target evaluated", lambda one: one.evaluated),
    "spec_decode_num_accepted_tokens": ("Evaluated nodes of this device that were committed", lambda one: one.accepted),
    "tokens": ("Tokens delivered", lambda one: one.tokens),
    "steps": ("Commits with tokens", lambda one: one.steps),
    "appends": ("Messages with nodes, or with the note that none will come", lambda one: one.appends),
    "attaches": ("Streams opened", lambda one: one.attaches),
    "reattaches": ("Streams opened by a request that had one before", lambda one: max(0, one.attaches - 1)),
    "failovers": ("Streams reopened at another verifier", lambda one: one.failovers),
    "draft_failures": ("Requests whose draft failed", lambda one: int(bool(one.draft_failure))),
    "draft_busy": ("Requests that got no draft worker, since all were in use", lambda one: int(one.draft_busy)),
    "draft_swaps": ("Drafts replaced while a request ran", lambda one: len(one.swaps_s)),
}
"""Metrics that only grow: the text of each, and its share of one request."""
_DRAFTS = ("model", NGRAM, "none")
"""What may draft for a request; a label of a metric, where a draft's name might be anything."""
_BY_RULE = ("spec_decode_num_evaluated_tokens", "spec_decode_num_accepted_tokens", "tokens", "steps")
"""Those that are counted by acceptance rule: with another one than `coupled`, the tokens are not the target's own."""

_TIMES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from the call to the first token, of ended requests", WAIT_S),
    "time_per_output_token_seconds": ("Mean time between tokens of an ended request", STEP_S),
    "request_seconds": ("Duration of ended requests", WAIT_S),
    "rtt_seconds": ("Round trip to the verifier when a request ended", STEP_S),
}
"""Histograms over the requests that have ended: the text of each, and its buckets."""


class EdgeMetrics(Collector):
    """The metrics of one client, which are used on its event loop alone."""

    def __init__(self) -> None:
        self._running: dict[int, Statistics] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        """(name, acceptance rule) -> the sum of one of _COUNTERS over the requests that have ended."""
        self._link_bytes: Counter[str] = Counter()
        self._finishes: Counter[str] = Counter()
        self._drafts: Counter[str] = Counter()
        """One of _DRAFTS -> requests that have ended."""
        self._times = {name: Histogram(buckets) for name, (_, buckets) in _TIMES.items()}
        self._http: Counter[tuple[str, str]] = Counter()
        self._registry = registry(self)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    @contextlib.contextmanager
    def following(self, statistics: Statistics, finish: Callable[[], str]) -> Iterator[None]:
        """Count a request while the body runs it, and how it ends: by the class of its error, or by `finish`."""
        self._running[id(statistics)] = statistics
        error_name = ""
        try:
            yield
        except Exception as error:
            error_name = type(error).__name__ if isinstance(error, OutriderError) else "InternalError"
            raise
        finally:
            del self._running[id(statistics)]
            self._add(statistics, error_name or finish())

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request. path: its route's, since a client could make up any number of others."""
        self._http[path, str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        counts, link_bytes = Counter(self._counts), Counter(self._link_bytes)
        for one in self._running.values():
            _add_counts(one, counts, link_bytes)
        yield gauge(f"{_PREFIX}requests_running", "Requests under way", len(self._running))
        text = "Requests that have ended, by finish reason or error"
        yield counter(f"{_PREFIX}requests", text, {**self._finishes}, "finish")
        for name, (text, _) in _COUNTERS.items():
            by_rule = {rule: counts[name, rule] for rule in RULES}
            if name in _BY_RULE:
                yield counter(f"{_PREFIX}{name}", text, by_rule, "rule")
            else:
                yield counter(f"{_PREFIX}{name}", text, sum(by_rule.values()))
        text = "Requests that have ended, by what drafted for them last: a model, n-grams alone, or nothing"
        yield counter(f"{_PREFIX}drafted_requests", text, {kind: self._drafts[kind] for kind in _DRAFTS}, "source")
        text = "Payload of sessions' messages"
        yield counter(f"{_PREFIX}link_bytes", text, {way: link_bytes[way] for way in ("up", "down")}, "direction")
        text = "HTTP requests answered, by route and status"
        yield counter(f"{_PREFIX}http_requests", text, {**self._http}, "path", "code")
        for name, (text, _) in _TIMES.items():
            yield histogram(f"{_PREFIX}{name}", text, self._times[name])

    def _add(self, one: Statistics, finish: str) -> None:
        self._finishes[finish] += 1
        self._drafts[_drafts_by(one)] += 1
        _add_counts(one, self._counts, self._link_bytes)
        times = self._times
        times["request_seconds"].add(one.clock() - one.begun)
        if one.first_token_s is not None:
            times["time_to_first_token_seconds"].add(one.first_token_s)
        if one.tokens_per_s:
            times["time_per_output_token_seconds"].add(1.0 / one.tokens_per_s)
        if one.rtt_ms:
            times["rtt_seconds"].add(one.rtt_ms / 1000)


def _drafts_by(one: Statistics) -> str:
    """Return which of _DRAFTS drafted last for a request."""
    return "none" if not one.draft else NGRAM if one.release == NGRAM else "model"


def _add_counts(one: Statistics, counts: Counter[tuple[str, str]], link_bytes: Counter[str]) -> None:
    counts.update({(name, one.rule): share(one) for name, (_, share) in _COUNTERS.items()})
    link_bytes.update({"up": one.bytes_up, "down": one.bytes_down})
