"""Convert the engine's counters and recorded tokens to protobuf, for the front."""

from __future__ import annotations

from cloud_verifier.engine.counters import EngineCounters
from cloud_verifier.engine.recording import Produced
from cloud_verifier.engine.stats import EngineStats
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


def produced_to_proto(produced: Produced) -> pb.Produced:
    visit = produced.visit
    return pb.Produced(
        start=visit.start,
        token=visit.tokens,
        top=produced.top_ids.shape[1],
        top_ids=produced.top_ids.astype("<u4").tobytes(),
        top_log_probs=produced.top_log_probs.astype("<f2").tobytes(),
        tail=produced.tail.astype("<f2").tobytes(),
        guessed=visit.guessed,
        draft_release=visit.draft,
    )


def _histogram(one: Histogram) -> pb.Histogram:
    return pb.Histogram(counts=one.counts, sum=one.sum)
