"""Imitate verifiers and sessions that exist only as reports to coordinators, and devices that open these sessions.

A verifier reports all of its sessions once a second over a connection of its own. Their telemetry goes on from report
to report: counts grow, and each session's drafts are accepted at random with a probability of its own. One whose
coordinator does not answer goes to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc, session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

INTERVAL_S = 1.0
CALL_TIMEOUT_S = 3.0
"""Of a report, as verifiers have it."""
OPEN_TIMEOUT_S = 10.0
HISTORY = 256
"""Outcomes of a session's acceptance history."""
STEP_MS, NODE_MS = 33.0, 0.3
POSITIONS = 60
"""Positions of a session in a second."""
ROWS = (1, 16, 64, 256, 1_024)
CLASSES = ("chat", "code", "mail", "notes")
TARGET = session_pb2.TargetIdentity(
    name="reported", weights_hash="sha256:" + 64 * "a", tokenizer_hash="sha256:" + 64 * "b", dtype="float32"
)


@dataclass
class Counts:
    """Counts the reports and calls of a span of time."""

    reports: int = 0
    sessions: int = 0
    """Sessions reported."""
    directives: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Calls that failed at every coordinator, and reports without an answer, by the reason."""
    ages_s: list[float] = field(default_factory=list)
    """The age that a verifier's decisions reach before the next ones come: from the report that they answer on."""
    open_s: list[float] = field(default_factory=list)
    """From when a session was due to be opened to the answer."""


class Session:
    """Holds the telemetry of one session."""

    def __init__(self, opened: pb.OpenSessionResponse, traffic_class: str, draw: random.Random) -> None:
        self._draw = draw
        self._acceptance = draw.uniform(0.4, 0.9)
        self.telemetry = SessionTelemetry(
            session_id=opened.session_id,
            epoch=opened.primary.epoch_first,
            tenant="default",
            traffic_class=traffic_class,
            rtt_ms=draw.uniform(5.0, 120.0),
            draft_ms=draw.uniform(2.0, 12.0),
            nodes_per_level=1.4,
        )

    def live(self) -> None:
        """Let a second pass."""
        told, new = self.telemetry, POSITIONS
        outcomes = bytes(2 * (self._draw.random() < self._acceptance) for _ in range(new))
        told.steps += round(1e3 / STEP_MS)
        told.committed += new
        told.positions += new
        told.first_accepted += sum(outcomes) // 2
        told.evaluated += 2 * new
        told.accepted += sum(outcomes) // 2
        told.acceptance_history = (told.acceptance_history + outcomes)[-HISTORY:]


class Verifier:
    """Registers, reports and takes in the answers."""

    def __init__(self, number: int, capacity: int, fleet: Fleet) -> None:
        self.name = f"verifier-{number}"
        self.sessions: dict[str, Session] = {}
        self.decided_s = 0.0
        """When the report was sent whose answer decided last."""
        self._number = number
        self._capacity = capacity
        self._fleet = fleet
        self._turn = number
        self._load = VerifierTelemetry(
            step_ms=STEP_MS,
            tokens_per_s=5_000.0,
            kv_used=50_000,
            kv_capacity=500_000,
            min_acceptance=0.1,
            node_ms=NODE_MS,
            step_cost_ms={rows: 25.0 + NODE_MS * rows for rows in ROWS},
            session_cost_ms=0.05,
        )
        self._connect()

    def _connect(self) -> None:
        coordinators = self._fleet.coordinators
        self._channel = channel(coordinators[self._turn % len(coordinators)])
        self._stub: Any = coordinator_pb2_grpc.RegistryStub(self._channel)  # type: ignore[no-untyped-call]

    async def register(self) -> None:
        request = pb.RegisterRequest(
            verifier_id=self.name,
            instance=self._number + 1,
            address=f"127.0.0.1:{10_000 + self._number}",
            target=TARGET,
            capacity_sessions=self._capacity,
        )
        await self._stub.Register(request, timeout=30.0)

    async def run(self, phase: float) -> None:
        """Report once a second, beginning at this part of a second, until cancelled."""
        due = time.monotonic() + phase * INTERVAL_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + INTERVAL_S, time.monotonic())
            try:
                await self._report()
            except grpc.aio.AioRpcError as error:
                self._fleet.counts.failed[f"Report {error.code().name}"] += 1
                await self._channel.close()
                self._turn += 1
                self._connect()
                due = time.monotonic() + 0.1 * INTERVAL_S

    async def _report(self) -> None:
        for session in self.sessions.values():
            session.live()
        self._load.live_sessions = len(self.sessions)
        request = pb.ReportRequest(
            verifier_id=self.name,
            instance=self._number + 1,
            verifier=self._load,
            sessions=[session.telemetry for session in self.sessions.values()],
        )
        sent_s, counts = time.monotonic(), self._fleet.counts
        answer: pb.ReportResponse = await self._stub.Report(request, timeout=CALL_TIMEOUT_S)
        counts.reports += 1
        counts.bytes_up += request.ByteSize()
        counts.bytes_down += answer.ByteSize()
        if not answer.known:
            await self.register()
            return
        counts.sessions += len(request.sessions)
        counts.directives += len(answer.directives)
        if answer.directives:
            if self.decided_s:
                counts.ages_s.append(time.monotonic() - self.decided_s)
            self.decided_s = sent_s
        for session_id in answer.closed:
            self.sessions.pop(session_id, None)

    async def close(self) -> None:
        await self._channel.close()


class Fleet:
    """Runs verifiers, and opens and closes their sessions. Use it as an async context manager."""

    def __init__(self, coordinators: Sequence[str], verifiers: int, capacity: int, seed: int = 0) -> None:
        self.coordinators = list(coordinators)
        self.counts = Counts()
        self.opened: deque[pb.OpenSessionResponse] = deque()
        """The live sessions, the oldest first."""
        self._draw = random.Random(seed)
        self._verifiers = {one.name: one for one in (Verifier(n, capacity, self) for n in range(verifiers))}
        self._turn = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self._channels = [channel(address) for address in self.coordinators]
        self._stubs: list[Any] = [coordinator_pb2_grpc.CoordinatorStub(one) for one in self._channels]  # type: ignore[no-untyped-call]
        verifiers = list(self._verifiers.values())
        await asyncio.gather(*(one.register() for one in verifiers))
        self._tasks = [asyncio.create_task(one.run(number / len(verifiers))) for number, one in enumerate(verifiers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._channels:
            await link.close()
        for verifier in self._verifiers.values():
            await verifier.close()

    @contextlib.asynccontextmanager
    async def counted(self) -> AsyncIterator[Counts]:
        """Count anew; yield the counts, which go on until this is left."""
        self.counts = counts = Counts()
        yield counts
        self.counts = Counts()

    async def fill(self, sessions: int, at_once: int = 16) -> None:
        """Open so many sessions."""
        left = itertools.count()

        async def some() -> None:
            while next(left) < sessions:
                await self.open()

        await asyncio.gather(*(some() for _ in range(at_once)))

    async def turn_over(self, per_s: float, seconds: float) -> None:
        """Open sessions at a fixed rate, however long the answers take, and close an old one for each."""
        begun, tasks = time.monotonic(), []

        async def one(due: float) -> None:
            await self.open()
            self.counts.open_s.append(time.monotonic() - due)
            await self.close_oldest()

        for number in range(round(per_s * seconds)):
            due = begun + number / per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(one(due)))
        await asyncio.gather(*tasks)

    async def open(self) -> None:
        traffic = self._draw.choice(CLASSES)
        opened = await self._call("OpenSession", pb.OpenSessionRequest(traffic_class=traffic, prompt_tokens=200))
        if opened is not None:
            self.opened.append(opened)
            verifier = self._verifiers[opened.primary.verifier_id]
            verifier.sessions[opened.session_id] = Session(opened, traffic, self._draw)

    async def close_oldest(self) -> None:
        oldest = self.opened.popleft()
        self._verifiers[oldest.primary.verifier_id].sessions.pop(oldest.session_id, None)
        request = pb.CloseSessionRequest(session_id=oldest.session_id, ticket=oldest.primary.ticket)
        await self._call("CloseSession", request)

    async def decided_since(self, since_s: float) -> None:
        """Wait until every verifier has decisions that answer a report sent since then."""
        while any(one.sessions and one.decided_s < since_s for one in self._verifiers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _call(self, method: str, request: Any) -> Any:
        """Return the answer of the first coordinator that gives one; None if none does, which is counted."""
        turn, reason = next(self._turn), ""
        for attempt in range(2 * len(self._stubs)):
            stub = self._stubs[(turn + attempt) % len(self._stubs)]
            try:
                return await getattr(stub, method)(request, timeout=OPEN_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                reason = f"{method} {error.code().name}: {error.details()}"[:160]
                await asyncio.sleep(0.05 * attempt)
        self.counts.failed[reason] += 1
        return None
