"""Convert the engine's counters and recorded tokens to protobuf, for the front."""

from __future__ import annotations

from cloud_verifier.engine.recording import RecordedTokens
from cloud_verifier.engine.stats import EngineCounters, EngineStats
from outrider.core.histogram import Histogram
from outrider.wire.v1 import engine_pb2 as pb


def counters_to_proto(counters: EngineCounters, stats: EngineStats) -> pb.EngineCounters:
    return pb.EngineCounters(
        steps=stats.steps,
        committed=stats.committed,
        prefilled=stats.prefilled,
        drafts=counters.drafts,
        evaluated=stats.evaluated,
        accepted=stats.accepted,
        accepted_by_position=counters.accepted_by_position,
        own_evaluated=stats.own_evaluated,
        own_accepted=stats.own_accepted,
        dead=stats.dead,
        ignored=stats.ignored,
        part_s=counters.part_s,
        step_s=_histogram(counters.step_s),
        rows=_histogram(counters.rows),
        first_token_s=_histogram(counters.first_token_s),
        token_s=_histogram(counters.token_s),
        queue_s=_histogram(counters.queue_s),
        sessions=stats.states,
    )


def produced_to_proto(recorded: RecordedTokens) -> pb.Produced:
    return pb.Produced(
        start=recorded.start,
        token=recorded.tokens,
        top=recorded.top_ids.shape[1],
        top_ids=recorded.top_ids.astype("<u4").tobytes(),
        top_log_probs=recorded.top_log_probs.astype("<f2").tobytes(),
        tail=recorded.tail.astype("<f2").tobytes(),
        guessed=recorded.guessed,
        draft_release=recorded.draft,
    )


def _histogram(one: Histogram) -> pb.Histogram:
    return pb.Histogram(counts=one.counts, sum=one.sum)
