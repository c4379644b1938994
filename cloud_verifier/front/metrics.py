"""Export a verifier's metrics: the counts of its front and the last statistics of its engine, read at each scrape.

A metric that vLLM has too keeps vLLM's name, behind `outrider_`. docs/metrics.md lists all metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front.service import VerifierService
from cloud_verifier.traffic.passage_builder import RecordingCounts
from outrider.core.histogram import ROWS, STEP_S, WAIT_S, Histogram
from outrider.telemetry.prometheus import counter, gauge, histogram
from outrider.wire.v1 import engine_pb2 as pb


class VerifierCollector(Collector):
    """Reads a verifier's metrics at each scrape. What does not exist while the target loads counts as empty."""

    def __init__(self, host: EngineHost, service: VerifierService, capacity: int = 0) -> None:
        """capacity: the most sessions served at once."""
        self._host = host
        self._service = service
        self._front = service.counters
        self._capacity = capacity

    def unready_reason(self) -> str:
        """Return why no session should be sent here; empty if sessions should be."""
        if self._host.ended.is_set():
            return "the engine has ended"
        if not self._service.serving:
            return "loading"
        return "draining" if self._service.live.draining else ""

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._engine()
        yield from self._memory()
        yield from self._streams()
        yield from self._process()

    def _speculation(self) -> Iterator[Metric]:
        counters, prefix, server = self._host.stats.counters, "outrider_spec_decode_num", "outrider_server_draft"
        lossy = counters.lossy
        for name, count, text in (
            ("drafts", "drafts", "Steps of a session that evaluated nodes of its device"),
            ("draft_tokens", "evaluated", "Nodes of devices that the target evaluated"),
            ("accepted_tokens", "accepted", "Evaluated nodes of devices that were committed"),
        ):
            yield counter(f"{prefix}_{name}", text, _by_rule(counters, count), "rule")
        text = "Accepted nodes by position after the last committed token; the first position is 0"
        coupled = _less(counters.accepted_by_position, lossy.accepted_by_position)
        by_rule = {"coupled": coupled, "typical": lossy.accepted_by_position}
        by_position = {(str(at), rule): float(n) for rule, counts in by_rule.items() for at, n in enumerate(counts)}
        yield counter(f"{prefix}_accepted_tokens_per_pos", text, by_position, "position", "rule")
        text = "Nodes of the verifier's own that the target evaluated"
        yield counter(f"{server}_tokens", text, counters.server_evaluated)
        text = "Nodes of the verifier's own that were committed"
        yield counter(f"{server}_accepted_tokens", text, counters.server_accepted)
        evaluated = {name: float(counts.evaluated) for name, counts in counters.sources.items()}
        accepted = {name: float(counts.accepted) for name, counts in counters.sources.items()}
        text = "Nodes that the target evaluated, by each of the verifier's sources that had proposed them"
        yield counter(f"{server}_source_tokens", text, evaluated, "source")
        text = "Nodes that were committed, by each of the verifier's sources that had proposed them"
        yield counter(f"{server}_source_accepted_tokens", text, accepted, "source")
        yield counter("outrider_nodes_received", "Nodes that devices sent", self._front.nodes)
        yield counter("outrider_nodes_dead", "Nodes that arrived too late, or below such a node", counters.dead)
        yield counter("outrider_nodes_ignored", "Nodes outside their session's speculation window", counters.ignored)

    def _engine(self) -> Iterator[Metric]:
        stats, counters = self._host.stats, self._host.stats.counters
        yield counter("outrider_generation_tokens", "Tokens committed", _by_rule(counters, "committed"), "rule")
        yield counter("outrider_prompt_tokens", "Prompt tokens computed", counters.prefilled)
        yield counter("outrider_steps", "Forward passes scheduled", counters.steps)
        yield histogram("outrider_step_seconds", "A step, from its plan to its commits", _of(STEP_S, counters.step_s))
        yield histogram("outrider_step_rows", "Rows of a step", _of(ROWS, counters.rows))
        text = "Time of all steps by part; the part between is the time between two steps while there is work"
        yield counter("outrider_step_part_seconds", text, dict(counters.part_s), "part")
        text = "From a session's start in the engine to its first token"
        yield histogram("outrider_time_to_first_token_seconds", text, _of(WAIT_S, counters.first_token_s))
        text = "Between two tokens of a session"
        yield histogram("outrider_inter_token_latency_seconds", text, _of(STEP_S, counters.token_s))
        text = "From a session's start in the engine to its first rows"
        yield histogram("outrider_queue_wait_seconds", text, _of(WAIT_S, counters.queue_s))
        text = "Least acceptance probability at which a node pays, 0 to 1"
        yield gauge("outrider_min_acceptance", text, stats.verifier.min_acceptance)
        yield gauge("outrider_sessions", "Live sessions by state", dict(counters.sessions), "state")
        yield gauge("outrider_session_capacity", "The most sessions served at once", self._capacity)

    def _memory(self) -> Iterator[Metric]:
        stats, counters, capacity = self._host.stats, self._host.stats.counters, self._host.stats.verifier.kv_capacity
        text = "KV slots: used and reserved by live sessions, or cached and free for any session"
        slots = {"used": stats.verifier.kv_used, "reserved": stats.kv_reserved, "cached": stats.kv_cached}
        yield gauge("outrider_kv_slots", text, slots, "state")
        yield gauge("outrider_kv_slot_capacity", "All KV slots", capacity)
        reserved = stats.kv_reserved / capacity if capacity else 0.0
        yield gauge("outrider_kv_cache_usage_ratio", "Share of KV slots reserved by live sessions, 0 to 1", reserved)
        yield counter("outrider_prefix_cache_hits", "Sessions that began with cached tokens", counters.prefix_hits)
        text = "Cached tokens that those sessions did not compute"
        yield counter("outrider_prefix_cache_hit_tokens", text, counters.prefix_tokens)

    def _streams(self) -> Iterator[Metric]:
        front = self._front
        yield counter("outrider_streams_opened", "Streams admitted", front.opened)
        text = "Admitted streams whose devices had received tokens before"
        yield counter("outrider_streams_resumed", text, front.resumed)
        yield counter(
            "outrider_refusals", "Streams that ended with an error before any token", {**front.refused}, "kind"
        )
        yield counter("outrider_streams_ended", "All other streams, by how they ended", {**front.ended}, "how")
        yield counter("outrider_appends", "Appends from devices, with or without nodes", front.appends)
        text = "From a device's nodes to the first commit that has seen them"
        yield histogram("outrider_append_to_commit_seconds", text, front.append_commit_s)
        yield histogram("outrider_rtt_seconds", "Round trips to devices, by ping", front.rtt_s)
        text = "Nodes to verify in one step, in the directives that devices got"
        yield histogram("outrider_window_nodes_per_step", text, front.nodes_per_step)
        text = "Window depth, in the directives that devices got"
        yield histogram("outrider_window_depth", text, front.depth)
        text = "Wait for nodes before a plain step, in the directives that devices got"
        yield histogram("outrider_window_draft_wait_seconds", text, front.draft_wait_s)

    def _process(self) -> Iterator[Metric]:
        front, live = self._front, self._service.live
        counts = live.recorder.counts if live.recorder is not None else RecordingCounts()
        dropped = counts.dropped + self._host.stats.unrecorded
        traffic = {**asdict(counts), "dropped": dropped}
        yield counter("outrider_traffic_tokens", "Tokens of recorded sessions by what became of them", traffic, "fate")
        reports = {"delivered": front.reports, "failed": front.reports_failed}
        yield counter("outrider_reports", "Reports to the coordinator", reports, "outcome")
        yield histogram("outrider_report_seconds", "From a report to the coordinator to its answer", front.report_s)
        yield gauge("outrider_ready", "Whether the target is loaded and registered", float(self._service.serving))
        yield gauge("outrider_draining", "Whether no new session is taken", float(live.draining))


def _by_rule(counters: pb.EngineCounters, name: str) -> dict[str, float]:
    """Return a count of sessions by their acceptance rule; that of `typical` is lossy."""
    lossy = getattr(counters.lossy, name)
    return {"coupled": getattr(counters, name) - lossy, "typical": lossy}


def _less(counts: Sequence[int], part: Sequence[int]) -> list[int]:
    return [count - (part[at] if at < len(part) else 0) for at, count in enumerate(counts)]


def _of(bounds: tuple[float, ...], counts: pb.Histogram) -> Histogram:
    return Histogram.of(bounds, counts.counts, counts.sum)
