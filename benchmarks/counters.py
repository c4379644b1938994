"""Measure the cost of metrics: microseconds of counting per step, message and call, and of a scrape.

Each number is the least of several rounds of many calls. The keys of the last line are `step_us` (a step of 16
sessions), `message_us` (a message with nodes and its commit, at the front), `snapshot_us` (what the engine sends to the
front four times a second), `scrape_us` (of a verifier), and `store_us` (a coordinator's call to Redis).
"""

from __future__ import annotations

import asyncio
import time
import timeit
import types
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.exposition import generate_latest

from benchmarks.support import harness
from cloud_verifier.engine.stats import STATES, EngineCounters
from cloud_verifier.engine.step_profiler import PARTS
from cloud_verifier.engine_process.loop import counters_to_proto
from cloud_verifier.front.counters import FrontCounters, StreamCounters
from cloud_verifier.front.metrics import VerifierCollector
from coordinator.store.redis_store import StoreCounters
from outrider.telemetry.prometheus import registry
from outrider.wire.v1 import engine_pb2, session_pb2

SESSIONS = 16
ROUNDS = 7


def per_call_us(call: Callable[[], object], calls: int) -> float:
    """Return the least of several rounds, since other work on the machine can only add to it."""
    return 1e6 * min(timeit.repeat(call, number=calls, repeat=ROUNDS)) / calls


def step(counters: EngineCounters) -> Callable[[], None]:
    """Return a call that counts one step, each of its sessions with accepted nodes."""
    parts = dict.fromkeys(PARTS, 0.004)

    def count() -> None:
        counters.count_step(parts, 5 * SESSIONS)
        for _ in range(SESSIONS):
            counters.count_nodes(4, 2)
            counters.count_commit(3, 0.0, gap_s=0.05, first=False)

    return count


def message() -> Callable[[], None]:
    """Return a call that counts a message with nodes, and the commit that has seen it, as the front does."""
    counters = StreamCounters(FrontCounters())
    commit = session_pb2.Commit(epoch=1, start=1, token=[5, 6], seen=3)

    def count() -> None:
        counters.append(first_id=1, nodes=3)
        counters.commit(commit)

    return count


def snapshot(counters: EngineCounters) -> Callable[[], engine_pb2.EngineCounters]:
    """Return a call that encodes the counters as the engine does, and decodes them as the front does."""
    stats: Any = types.SimpleNamespace(dead=1_000, ignored=0, states=dict.fromkeys(STATES, 4))
    return lambda: engine_pb2.EngineCounters.FromString(counters_to_proto(counters, stats).SerializeToString())


def scrape(counters: engine_pb2.EngineCounters) -> Callable[[], bytes]:
    host: Any = types.SimpleNamespace(stats=engine_pb2.EngineStats(counters=counters), ended=asyncio.Event())
    own = registry(VerifierCollector(host))
    return lambda: generate_latest(own)


def store() -> Callable[[], None]:
    counters = StoreCounters()
    return lambda: counters.calls_s["report"].add(time.perf_counter() - 1.0)


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("counters", __doc__).parse_args(argv)
    scale = options.size.pick(smoke=100, quick=10, full=1)
    counters = EngineCounters(0.0)
    take = snapshot(counters)
    result = {
        "step_us": per_call_us(step(counters), 5_000 // scale),
        "message_us": per_call_us(message(), 50_000 // scale),
        "snapshot_us": per_call_us(take, 5_000 // scale),
        "scrape_us": per_call_us(scrape(take()), 500 // scale),
        "store_us": per_call_us(store(), 100_000 // scale),
    }
    for name, microseconds in result.items():
        print(f"{name:12} {microseconds:9.2f}")
    harness.finish({name: round(microseconds, 2) for name, microseconds in result.items()})


if __name__ == "__main__":
    main()
