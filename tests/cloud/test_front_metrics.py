"""Test the front's counts of its streams, and the scrape of a verifier."""

from __future__ import annotations

import pytest
from prometheus_client.exposition import generate_latest
from scripted_engine import front, until

from cloud_verifier.front.metrics import VerifierCollector
from outrider.core.errors import InternalError, Overloaded
from outrider.telemetry.prometheus import registry
from outrider.wire.v1 import engine_pb2, session_pb2
from outrider.wire.v1.telemetry_pb2 import VerifierTelemetry


@pytest.fixture
async def plain(tmp_path):
    async with front(tmp_path, max_sessions=2) as running:
        yield running


def scrape(running) -> dict[str, float]:
    """Return name{labels} -> value, without our prefix."""
    collector = VerifierCollector(running.host, running.service, 2)
    text = generate_latest(registry(collector)).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("outrider_"): float(value) for name, _, value in lines}


async def test_streams_are_counted_by_how_they_ended(plain) -> None:
    assert {how for how in scrape(plain) if how.startswith("streams_ended")} > {'streams_ended_total{how="gone"}'}
    stream = await plain.open("done")
    plain.engine.commit("done", 1, 0, [5], finish=session_pb2.FINISH_LENGTH)
    await stream.tokens()
    await stream.call.done_writing()
    (await plain.open("gone")).call.cancel()
    stream = await plain.open("broken")
    plain.engine.commit("broken", 1, 0, [5])
    await stream.tokens()
    plain.engine.fail("broken", 1, InternalError("a defect"))
    await stream.refusal()
    await until(lambda: plain.service.counters.ended.total() == 3)
    stream = await plain.open("refused")
    plain.engine.fail("refused", 1, Overloaded("no slots"))
    await stream.refusal()
    await until(lambda: plain.service.counters.refused.total() == 1)
    found = scrape(plain)
    assert found['refusals_total{kind="Overloaded"}'] == 1
    assert [found[f'streams_ended_total{{how="{how}"}}'] for how in ("length", "gone", "InternalError")] == [1, 1, 1]
    assert (found["streams_opened_total"], found["streams_resumed_total"]) == (4, 0)


async def test_a_scrape_shows_the_engines_last_statistics(plain) -> None:
    counters = engine_pb2.EngineCounters(
        committed=28,
        drafts=5,
        evaluated=15,
        accepted=9,
        accepted_by_position=[5, 2],
        lossy=engine_pb2.SpeculationCounts(committed=8, drafts=2, evaluated=6, accepted=5, accepted_by_position=[2, 1]),
        sessions={"decode": 2},
        part_s={"forward": 0.5},
        first_token_s=engine_pb2.Histogram(counts=[0, 1, *[0] * 12], sum=0.01),
    )
    plain.engine.send(
        stats=engine_pb2.EngineStats(
            verifier=VerifierTelemetry(min_acceptance=0.25, kv_capacity=256),
            kv_reserved=64,
            unrecorded=5,
            counters=counters,
        )
    )
    await until(lambda: plain.host.stats.verifier.min_acceptance == 0.25)
    found = scrape(plain)
    coupled, typical = '{rule="coupled"}', '{rule="typical"}'
    for name, one, other in (("drafts", 3, 2), ("draft_tokens", 9, 6), ("accepted_tokens", 4, 5)):
        found_of_both = [found[f"spec_decode_num_{name}_total{rule}"] for rule in (coupled, typical)]
        assert found_of_both == [one, other]
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[f'{per_position}{{position="{at}",rule="coupled"}}'] for at in (0, 1)] == [3, 1]
    assert [found[f'{per_position}{{position="{at}",rule="typical"}}'] for at in (0, 1)] == [2, 1]
    assert [found[f"generation_tokens_total{rule}"] for rule in (coupled, typical)] == [20, 8]
    assert found['sessions{state="decode"}'] == 2
    assert found['step_part_seconds_total{part="forward"}'] == 0.5
    assert found['time_to_first_token_seconds_bucket{le="0.005"}'] == 0
    assert found['time_to_first_token_seconds_bucket{le="0.01"}'] == 1
    assert found["kv_cache_usage_ratio"] == 0.25
    assert found['traffic_tokens_total{fate="dropped"}'] == 5
