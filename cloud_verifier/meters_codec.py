"""The engine's meters as it tells them to the front."""

from __future__ import annotations

from cloud_verifier.engine.meters import EngineMeters
from cloud_verifier.engine.stats import EngineStats
from outrider.core.histogram import Histogram
from outrider.wire.v1 import engine_pb2 as pb


def meters_to_proto(meters: EngineMeters, stats: EngineStats) -> pb.EngineMeters:
    return pb.EngineMeters(
        steps=stats.steps,
        committed=stats.committed,
        prefilled=stats.prefilled,
        drafts=meters.drafts,
        evaluated=stats.evaluated,
        accepted=stats.accepted,
        accepted_by_position=meters.accepted_by_position,
        own_evaluated=stats.own_evaluated,
        own_accepted=stats.own_accepted,
        dead=stats.dead,
        ignored=stats.ignored,
        part_s=meters.part_s,
        step_s=_histogram(meters.step_s),
        rows=_histogram(meters.rows),
        first_token_s=_histogram(meters.first_token_s),
        token_s=_histogram(meters.token_s),
        queue_s=_histogram(meters.queue_s),
        sessions=stats.states,
    )


def _histogram(one: Histogram) -> pb.Histogram:
    return pb.Histogram(counts=one.counts, sum=one.sum)
