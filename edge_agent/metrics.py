"""Metrics of a device, added up from its requests' own statistics whenever they are scraped.

Nothing is counted twice, and nothing while a token is delivered: the statistics of a running request are read as they
are, and those of one that has ended are added to sums. docs/metrics.md lists all metrics.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from edge_agent.session.statistics import Statistics
from outrider.core.errors import OutriderError
from outrider.core.histogram import STEP_S, WAIT_S, Histogram
from outrider.telemetry.prometheus import counter, gauge, histogram, registry

_COUNTED = (
    "tokens",
    "steps",
    "drafted",
    "evaluated",
    "accepted",
    "appends",
    "attaches",
    "failovers",
    "bytes_up",
    "bytes_down",
)
"""The fields of Statistics that only grow."""


@dataclass
class RequestRecord:
    """A running request, as the metrics see it."""

    statistics: Statistics
    finish: str = "cancelled"
    """The FinishReason, once the request has ended."""


@dataclass
class _Ended:
    """Sums over all requests that have ended."""

    counts: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    """Requests by FinishReason, or by the class of their error."""
    reattached: int = 0
    draft_failures: int = 0
    swaps: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    per_token_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    request_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    rtt_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    answer_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))

    def add(self, one: Statistics, finish: str) -> None:
        self.finishes[finish] += 1
        self.counts.update(_counts(one))
        self.reattached += max(0, one.attaches - 1)
        self.draft_failures += bool(one.draft_failure)
        self.swaps += len(one.swaps_s)
        self.request_s.add(one.clock() - one.begun)
        if one.first_token_s is not None:
            self.first_token_s.add(one.first_token_s)
        if one.tokens_per_s:
            self.per_token_s.add(1.0 / one.tokens_per_s)
        if one.rtt_ms:
            self.rtt_s.add(one.rtt_ms / 1000)
        for seconds in one.answers_s:
            self.answer_s.add(seconds)


class EdgeMetrics(Collector):
    """The metrics of one client, which are used on its event loop alone."""

    def __init__(self) -> None:
        self._following: dict[int, RequestRecord] = {}
        self._ended = _Ended()
        self._answered: Counter[tuple[str, str]] = Counter()
        self._registry = registry(self)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    @contextlib.contextmanager
    def following(self, statistics: Statistics) -> Iterator[RequestRecord]:
        """Count a request while the body runs it, and how it ends: by the `finish` that the body sets, or its error."""
        one = RequestRecord(statistics)
        self._following[id(one)] = one
        try:
            yield one
        except Exception as error:
            one.finish = type(error).__name__ if isinstance(error, OutriderError) else "InternalError"
            raise
        finally:
            del self._following[id(one)]
            self._ended.add(statistics, one.finish)

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request. path: its route's, since a client could make up any number of others."""
        self._answered[path, str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        live, ended = [one.statistics for one in self._following.values()], self._ended
        counts = Counter(ended.counts)
        for one in live:
            counts.update(_counts(one))
        name = "outrider_edge"
        yield gauge(f"{name}_requests_running", "Requests under way", len(live))
        yield counter(
            f"{name}_requests", "Requests that have ended, by finish reason or error", {**ended.finishes}, "finish"
        )
        yield from _speculation(counts)
        yield counter(f"{name}_tokens", "Tokens delivered", counts["tokens"])
        yield counter(f"{name}_steps", "Commits with tokens", counts["steps"])
        yield counter(f"{name}_appends", "Messages with nodes, or with the note that none will come", counts["appends"])
        text = "Payload of sessions' messages"
        link = {"up": counts["bytes_up"], "down": counts["bytes_down"]}
        yield counter(f"{name}_link_bytes", text, link, "direction")
        yield counter(f"{name}_attaches", "Streams opened", counts["attaches"])
        again = ended.reattached + sum(max(0, one.attaches - 1) for one in live)
        yield counter(f"{name}_reattaches", "Streams opened by a session that had one before", again)
        yield counter(f"{name}_failovers", "Streams reopened at another verifier", counts["failovers"])
        failures = ended.draft_failures + sum(bool(one.draft_failure) for one in live)
        yield counter(f"{name}_draft_failures", "Requests whose draft failed", failures)
        swaps = ended.swaps + sum(len(one.swaps_s) for one in live)
        yield counter(f"{name}_draft_swaps", "Drafts replaced while a request ran", swaps)
        text = "HTTP requests answered, by route and status"
        yield counter(f"{name}_http_requests", text, {**self._answered}, "path", "code")
        yield from self._times()

    def _times(self) -> Iterator[Metric]:
        name, ended = "outrider_edge", self._ended
        yield histogram(
            f"{name}_time_to_first_token_seconds",
            "Time from the call to the first token, of ended requests",
            ended.first_token_s,
        )
        text = "Mean time between tokens of an ended request"
        yield histogram(f"{name}_time_per_output_token_seconds", text, ended.per_token_s)
        yield histogram(f"{name}_request_seconds", "Duration of ended requests", ended.request_s)
        text = "Round trip to the verifier when a request ended"
        yield histogram(f"{name}_rtt_seconds", text, ended.rtt_s)
        text = "Time from a commit that left the verifier without nodes to the next nodes sent"
        yield histogram(f"{name}_answer_seconds", text, ended.answer_s)


def _speculation(counts: Counter[str]) -> Iterator[Metric]:
    name = "outrider_edge_spec_decode_num"
    yield counter(f"{name}_draft_tokens", "Nodes sent", counts["drafted"])
    yield counter(f"{name}_evaluated_tokens", "Nodes that the target evaluated", counts["evaluated"])
    text = "Delivered tokens that were a node of this device"
    yield counter(f"{name}_accepted_tokens", text, counts["accepted"])


def _counts(one: Statistics) -> dict[str, int]:
    return {name: getattr(one, name) for name in _COUNTED}
