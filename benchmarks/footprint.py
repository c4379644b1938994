"""Measure what one session takes: bytes in Redis, on the wire and in the traffic log, commands and CPU time by call.

A real coordinator runs over a real Redis. Verifiers that exist only as reports have 100 sessions each, which devices
open with a tenant's key, and report them; then the sessions are closed. After that the pair in `models` serves texts
over sessions with a checksum and padding, as beyond this machine, and records all of them.

The keys of the last line: `redis_bytes` by live session with its place and telemetry, by session that was closed, and
by verifier; `redis_commands` and `redis_us` (CPU time) by session that is opened or closed and by report of 100
sessions, those of scripts included; `coordinator_us` (CPU time) likewise, of a report without the decisions about
windows; `fleet_us` (CPU time) by verifier when a coordinator reads all of them; `rpc_bytes` of requests and answers;
`link_bytes` and `commits` by token, with the draft and without, but for the headers of gRPC, HTTP/2 and TLS;
`log_bytes` by recorded token. `lost`: calls that failed.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import redis as redis_client

from benchmarks.support import harness, proc
from benchmarks.support.harness import Criterion, Pair, Size
from coordinator.cluster import Cluster, stand_apart
from coordinator.store.embedded_redis import EmbeddedServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.verifiers import VerifierStore
from edge_agent import AsyncClient, EdgeSettings
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc, session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

SESSIONS = 100
"""Sessions of each verifier."""
POSITIONS = 25
"""Positions of a session in a second, whose outcomes a report has."""
TENANTS = {"acme": "key-of-acme-0123456789", "bobs": "key-of-bobs-0123456789"}
TARGET = session_pb2.TargetIdentity(
    name="demo", weights_hash="sha256:" + 64 * "w", tokenizer_hash="sha256:" + 64 * "t", dtype="bfloat16"
)
AT_ONCE = 16
Stub = Any


@dataclass
class Spent:
    """Totals of Redis and of the coordinator at one moment."""

    commands: int
    redis_s: float
    coordinator_s: float
    memory: int

    def since(self, before: Spent, calls: int) -> tuple[float, float, float]:
        """Return commands, microseconds of Redis and microseconds of the coordinator by call."""
        return (
            round((self.commands - before.commands) / calls, 1),
            round(1e6 * (self.redis_s - before.redis_s) / calls, 1),
            round(1e6 * (self.coordinator_s - before.coordinator_s) / calls, 1),
        )


@dataclass
class ControlPlane:
    """A coordinator and its Redis, with the calls that devices and verifiers make."""

    redis: redis_client.Redis
    coordinator_pid: int
    link: grpc.aio.Channel
    rng: random.Random = field(default_factory=lambda: random.Random(20_261_126))
    lost: int = 0
    opened: list[tuple[str, pb.OpenSessionResponse]] = field(default_factory=list)
    """Tenant and answer of each session."""

    def __post_init__(self) -> None:
        self.sessions: Stub = coordinator_pb2_grpc.CoordinatorStub(self.link)  # type: ignore[no-untyped-call]
        self.registry: Stub = coordinator_pb2_grpc.RegistryStub(self.link)  # type: ignore[no-untyped-call]

    def spent(self) -> Spent:
        stats: dict[str, dict[str, int]] = self.redis.info("commandstats")
        own = ("cmdstat_info", "cmdstat_ping")
        cpu: dict[str, float] = self.redis.info("cpu")
        memory: dict[str, int] = self.redis.info("memory")
        return Spent(
            sum(entry["calls"] for name, entry in stats.items() if name not in own),
            cpu["used_cpu_user"] + cpu["used_cpu_sys"],
            proc.cpu_seconds(self.coordinator_pid),
            memory["used_memory"],
        )

    async def each(self, calls: Iterable[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """Make the calls, a few at a time; return the answers of those that did not fail."""
        waiting, answers = iter(calls), []

        async def worker() -> None:
            for call in waiting:
                try:
                    answers.append(await call())
                except grpc.aio.AioRpcError as error:
                    self.lost += 1
                    print(error.details(), file=sys.stderr)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        return answers

    async def register(self, number: int) -> None:
        request = pb.RegisterRequest(
            verifier_id=f"verifier-{number}",
            address=f"verifier-{number}.example:7710",
            target=TARGET,
            capacity_sessions=2 * SESSIONS,
            instance=1,
            region="eu-west",
        )
        await self.registry.Register(request)

    async def open(self) -> pb.OpenSessionResponse:
        tenant = self.rng.choice(tuple(TENANTS))
        request = open_request()
        answer: pb.OpenSessionResponse = await self.sessions.OpenSession(request, metadata=key_of(tenant))
        self.opened.append((tenant, answer))
        return answer

    async def close(self, tenant: str, opened: pb.OpenSessionResponse) -> None:
        request = pb.CloseSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        await self.sessions.CloseSession(request, metadata=key_of(tenant))

    def report_of(self, number: int, second: int) -> pb.ReportRequest:
        """Return the report of a verifier's sessions, each of which has gone on by a second."""
        name = f"verifier-{number}"
        mine = [(tenant, one) for tenant, one in self.opened if one.primary.verifier_id == name]
        return pb.ReportRequest(
            verifier_id=name,
            instance=1,
            verifier=VerifierTelemetry(
                live_sessions=len(mine),
                step_ms=40.0,
                tokens_per_s=2_500.0,
                kv_used=100_000,
                kv_capacity=400_000,
                step_cost_ms={1: 30.0, 64: 33.2, 128: 60.0, 256: 120.0, 512: 230.0},
                timing_ms={"between": 1.0, "forward": 38.0},
            ),
            sessions=[self._telemetry(tenant, one, second) for tenant, one in mine],
            tenant_tokens=dict.fromkeys(TENANTS, 1_000),
        )

    def _telemetry(self, tenant: str, opened: pb.OpenSessionResponse, second: int) -> SessionTelemetry:
        history = bytes(self.rng.choices((2, 1, 0), (0.7, 0.1, 0.2), k=POSITIONS))
        return SessionTelemetry(
            session_id=opened.session_id,
            epoch=opened.primary.epoch_first,
            tenant=tenant,
            steps=25 * (second + 1),
            committed=60 * (second + 1),
            evaluated=120 * (second + 1),
            accepted=35 * (second + 1),
            rtt_ms=20.0,
            acceptance_history=history,
            draft_ms=4.0,
            nodes_per_level=1.4,
            draft_release=64 * "d",
            traffic_class="chat",
            positions=60 * (second + 1),
            first_accepted=40 * (second + 1),
        )


def open_request() -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        prompt_tokens=200, draft_release=64 * "d", traffic_class="chat", round_trips={"eu-west": 12.5, "us-east": 91.0}
    )


def key_of(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TENANTS[tenant]}"),)


async def control_plane(verifiers: int, seconds: int) -> tuple[dict[str, Any], int]:
    """Return the figures of Redis and of the coordinator, and how many calls failed."""
    names, by_call = ("redis_commands", "redis_us", "coordinator_us"), {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch, EmbeddedServer() as server:
        stand_apart(Path(scratch))
        keys = ", ".join(f'"{name}": "{key}"' for name, key in TENANTS.items())
        environment = {"OUTRIDER_COORDINATOR_TENANT_KEYS": f"{{{keys}}}"}
        async with Cluster(logs=Path(scratch) / "logs", environment=environment) as cluster:
            flags = ("--redis", server.url, "--no-window-control", "--tenant-opens-per-minute", "0")
            child = await cluster.start_coordinator(*harness.LOOPBACK, *flags, "--lease-ms", "600000")
            async with channel(cluster.address) as link:
                plane = ControlPlane(redis_client.Redis.from_url(server.url), child.pid, link)
                empty = plane.spent()
                await plane.each(functools.partial(plane.register, n) for n in range(verifiers))
                registered = plane.spent()
                total = verifiers * SESSIONS
                answers = await plane.each(plane.open for _ in range(total))
                before = plane.spent()
                by_call["open"] = before.since(registered, total)
                reports = [plane.report_of(n, second) for second in range(seconds) for n in range(verifiers)]
                replies = await plane.each(functools.partial(plane.registry.Report, r) for r in reports)
                live = plane.spent()
                by_call["report"] = live.since(before, len(reports))
                fleet_us = await read_fleet(server.url, plane, verifiers)
                await plane.each(functools.partial(plane.close, *one) for one in plane.opened)
                closed = plane.spent()
                by_call["close"] = closed.since(live, total)
    figures: dict[str, Any] = {
        name: {call: values[i] for call, values in by_call.items()} for i, name in enumerate(names)
    }
    figures["fleet_us"] = fleet_us
    figures["redis_bytes"] = {
        "session": round((live.memory - registered.memory) / total),
        "closed": round((closed.memory - registered.memory) / total),
        "verifier": round((registered.memory - empty.memory) / verifiers),
    }
    figures["rpc_bytes"] = {
        "open": [open_request().ByteSize(), _mean(answers)],
        "report": [_mean(reports), _mean(replies)],
    }
    return figures, plane.lost


async def read_fleet(url: str, plane: ControlPlane, verifiers: int) -> dict[str, float]:
    """Return the CPU time by verifier, in microseconds, of reading the fleet as coordinators do to place sessions."""
    store, rounds = RedisStore(url, timeout_s=30.0), 50
    before, begun = plane.spent(), time.process_time()
    for _ in range(rounds):
        await VerifierStore(store).find()
    own_s, redis_s = time.process_time() - begun, plane.spent().redis_s - before.redis_s
    await store.close()
    calls = 1e-6 * rounds * verifiers
    return {"coordinator": round(own_s / calls, 1), "redis": round(redis_s / calls, 1)}


async def served(pair: Pair, texts: int, tokens: int) -> dict[str, Any]:
    """Return the bytes by token of sessions and of the traffic log."""
    figures: dict[str, Any] = {"link_bytes": {}, "commits": {}}
    prompts = harness.prompts("heldout", texts)
    async with harness.cluster() as running:
        with tempfile.TemporaryDirectory(prefix="outrider-traffic-") as log:
            await running.start_coordinator(*harness.LOOPBACK, "--recording-share", "1")
            models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
            verifier = await running.start_verifier(*models, "--traffic", log)
            settings = EdgeSettings(padding="buckets")
            recorded = 0
            for name, draft in (("with draft", "auto"), ("without draft", None)):
                async with AsyncClient(
                    coordinator=running.address, draft=draft, timeout=None, settings=settings
                ) as client:
                    done = [
                        (
                            await client.generate(
                                one.text, max_tokens=tokens, temperature=0.8, seed=number, ignore_eos=True
                            )
                        ).statistics
                        for number, one in enumerate(prompts)
                    ]
                total = sum(one.tokens for one in done)
                recorded += total
                up, down = sum(one.bytes_up for one in done), sum(one.bytes_down for one in done)
                figures["link_bytes"][name] = {"up": round(up / total, 1), "down": round(down / total, 1)}
                figures["commits"][name] = round(sum(one.steps for one in done) / total, 2)
            await verifier.stop()
            figures["log_bytes"] = round(_bytes_of_segments(Path(log)) / recorded)
    return figures


def _bytes_of_segments(log: Path) -> int:
    sizes = [path.stat().st_size for path in log.rglob("*.parquet")]
    return sum(sizes)


def _mean(messages: Sequence[Any]) -> int:
    total: int = sum(message.ByteSize() for message in messages)
    return round(total / max(1, len(messages)))


async def run(size: Size, pair: Pair) -> tuple[dict[str, Any], list[Criterion]]:
    figures, lost = await control_plane(size.pick(smoke=1, quick=5, full=20), size.pick(smoke=2, quick=10, full=20))
    figures |= await served(pair, size.pick(smoke=1, quick=6, full=18), size.pick(smoke=16, quick=64, full=128))
    figures["lost"] = lost
    return figures, [Criterion.bound("calls that failed", lost, at_most=0, enforced_from=Size.SMOKE)]


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("footprint", __doc__).parse_args(argv)
    figures, criteria = asyncio.run(run(options.size, Pair.in_folder(options.models)))
    harness.finish(figures, criteria, options.size)


if __name__ == "__main__":
    main()
