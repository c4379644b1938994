"""Run verifiers that exist only as reports in a process of its own, a child of benchmarks.control_plane, by JSON lines.

Each reports its sessions once a second over a connection of its own, as the verifiers' front does, with telemetry that
goes on from report to report: counts grow, and acceptance histories move along simulated texts. One whose coordinator
does not answer goes to the next one, as behind a Kubernetes Service, and reports again a moment later.

{"id": n, "op": "measure"}                                    -> what has been measured since the last such request
{"id": n, "op": "sessions", "added": [...], "removed": [...]} -> {"id": n}
{"id": n, "op": "decided", "since": t}                        -> {"id": n}, once all were decided about since then
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.support.fleet_simulation.world import KINDS, NODES_PER_LEVEL, SimulatedDevice, SimulatedText, step_cost
from outrider.core.acceptance.history import HIT, MISS
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc, session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

INTERVAL_S = 1.0
RETRY_S = 0.1
"""Time until a report is repeated that has failed, once."""
CALL_TIMEOUT_S = 3.0
"""As the verifiers' (cloud_verifier.front.registration)."""
HISTORY = 256
"""Outcomes of a report's acceptance history, as the verifiers'."""
TEXT = 20_000
"""Outcomes of a simulated text, which its sessions begin somewhere in and repeat."""
STEP_MS = 33.0
TARGET = session_pb2.TargetIdentity(
    name="fake", weights_hash="sha256:fake", tokenizer_hash="sha256:t", dtype="float32", backend="sdpa", hardware="cpu"
)


@dataclass
class Measured:
    """Counts the reports that were sent since the last question, and what was answered."""

    reports: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Reports without an answer, by the status."""
    unknown: int = 0
    """Answers that told a verifier to register again."""
    ages_s: list[float] = field(default_factory=list)
    """Of the decisions that a verifier had when the next answer came, for each answer."""
    answer_s: list[float] = field(default_factory=list)
    directives: int = 0
    sessions: int = 0
    """Sessions reported, of which `directives` were decided about."""
    bytes: int = 0


class FakeSession:
    """Holds the telemetry of one session."""

    def __init__(self, placed: dict[str, Any], rng: random.Random, texts: dict[str, bytes]) -> None:
        device = SimulatedDevice.drawn(rng)
        self._text = texts[device.kind]
        self._at = rng.randrange(TEXT)
        self._speed = rng.uniform(1.5, 3.5) / (STEP_MS / 1e3)
        self.telemetry = SessionTelemetry(
            session_id=placed["session_id"],
            epoch=placed["epoch"],
            tenant=placed["tenant"],
            draft_release=placed["draft"],
            traffic_class=placed["traffic"],
            rtt_ms=1e3 * device.rtt_s,
            draft_ms=1e3 * device.draft_s,
            nodes_per_level=NODES_PER_LEVEL,
        )
        for _ in range(rng.randrange(1, 6)):  # it has been here for some seconds
            self.live()

    def live(self) -> int:
        """Let a second pass, and return the tokens of it."""
        told, tokens = self.telemetry, round(self._speed)
        fresh = self._text[self._at : self._at + tokens]
        self._at = (self._at + tokens) % TEXT
        told.steps += round(1e3 / STEP_MS)
        told.committed += tokens
        told.positions += tokens
        told.first_accepted += fresh.count(HIT)
        told.evaluated += 2 * tokens
        told.accepted += len(fresh) - fresh.count(MISS)
        told.acceptance_history = (told.acceptance_history + fresh)[-HISTORY:]
        return tokens


class FakeVerifier:
    """Registers, reports and takes in the answers."""

    def __init__(self, number: int, capacity: int, coordinators: Sequence[str], measured: Measured) -> None:
        self.name = f"v{number}"
        self.sessions: dict[str, FakeSession] = {}
        self.decided_unix = 0.0
        self.answered = asyncio.Event()
        """Set, and cleared at once, with each answer."""
        self._since_unix = 0.0
        """When it first reported sessions, by the store's clock."""
        self._number = number
        self._coordinators = coordinators
        self._turn = number
        self._measured = measured
        self._identity: dict[str, Any] = {"verifier_id": self.name, "instance": number + 1}
        self._capacity = capacity
        self._tokens: Counter[str] = Counter()
        self._sequence = 1
        self._seen = 0
        rows = (1, 32, 64, 128, 256, 512, 1_024)
        cost = step_cost(256)
        self._verifier = VerifierTelemetry(
            step_ms=STEP_MS,
            tokens_per_s=5_000.0,
            kv_used=50_000,
            kv_capacity=500_000,
            min_acceptance=0.1,
            node_ms=0.05,
            step_cost_ms={n: 1e3 * cost.seconds(n, 1) for n in rows},
            session_cost_ms=0.01,
            timing_ms={"forward": 25.0, "sample": 3.0, "verify": 2.0, "between": 1.0},
        )
        self._connect()

    def _connect(self) -> None:
        self._channel = channel(self._coordinators[self._turn % len(self._coordinators)])
        self._stub = coordinator_pb2_grpc.RegistryStub(self._channel)  # type: ignore[no-untyped-call]

    async def register(self) -> None:
        request = pb.RegisterRequest(
            address=f"127.0.0.1:{10_000 + self._number}",
            target=TARGET,
            capacity_sessions=self._capacity,
            **self._identity,
        )
        await self._stub.Register(request, timeout=60.0)

    async def forever(self, phase: float) -> None:
        """Report once a second, from `phase` (0 to 1) of a second on."""
        due, answered = time.monotonic() + phase * INTERVAL_S, False
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + INTERVAL_S, time.monotonic())
            try:
                await self._report()
                answered = True
            except grpc.aio.AioRpcError as error:
                self._measured.failed[error.code().name] += 1
                await self._channel.close()
                self._turn += 1
                self._connect()
                if answered:
                    due = time.monotonic() + RETRY_S
                answered = False

    async def _report(self) -> None:
        for session in self.sessions.values():
            self._tokens[session.telemetry.tenant] += session.live()
        self._verifier.live_sessions = len(self.sessions)
        request = pb.ReportRequest(
            verifier=self._verifier,
            sessions=[session.telemetry for session in self.sessions.values()],
            revocations_seen=self._seen,
            tenant_tokens=self._tokens,
            tokens_sequence=self._sequence,
            **self._identity,
        )
        measured, begun = self._measured, time.monotonic()
        answer: pb.ReportResponse = await self._stub.Report(request, timeout=CALL_TIMEOUT_S)
        measured.answer_s.append(time.monotonic() - begun)
        measured.reports += 1
        measured.bytes += request.ByteSize()
        if not answer.known:
            measured.unknown += 1
            await self.register()
            return
        self._tokens.clear()
        self._sequence += 1
        self._seen = answer.revocations_seen
        if request.sessions:
            self._since_unix = self._since_unix or answer.store_unix
            measured.ages_s.append(answer.store_unix - (self.decided_unix or self._since_unix))
        measured.sessions += len(request.sessions)
        measured.directives += len(answer.directives)
        self.decided_unix = answer.decided_unix or self.decided_unix  # without any those before go on
        self.answered.set()
        self.answered.clear()
        for session_id in answer.closed:
            self.sessions.pop(session_id, None)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support.fake_verifiers", description=__doc__)
    parser.add_argument("options", type=json.loads, help="coordinators, verifiers, capacity and seed, as JSON")
    options = parser.parse_args().options
    rng, measured = random.Random(options["seed"]), Measured()
    texts = {kind: SimulatedText(kind, random.Random(kind)).take(TEXT) for kind in KINDS}
    fakes = [
        FakeVerifier(i, options["capacity"], options["coordinators"], measured) for i in range(options["verifiers"])
    ]
    by_name = {fake.name: fake for fake in fakes}
    await asyncio.gather(*(fake.register() for fake in fakes))
    tasks = [asyncio.create_task(fake.forever(i / len(fakes))) for i, fake in enumerate(fakes)]
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps({"ready": True}), flush=True)

    async def decided(number: int, since: float) -> None:
        for fake in fakes:
            while fake.sessions and fake.decided_unix < since:
                await fake.answered.wait()
        print(json.dumps({"id": number}), flush=True)

    waiting = set()
    async for line in lines:
        request = json.loads(line)
        if request["op"] == "decided":
            waiting.add(asyncio.create_task(decided(request["id"], request["since"])))
            continue
        answer: dict[str, Any] = {}
        if request["op"] == "sessions":
            for verifier, session_id in request["removed"]:
                by_name[verifier].sessions.pop(session_id, None)
            for placed in request["added"]:
                by_name[placed["verifier"]].sessions[placed["session_id"]] = FakeSession(placed, rng, texts)
        else:
            answer = dict(vars(measured))
            vars(measured).update(vars(Measured()))
        print(json.dumps({"id": request["id"]} | answer), flush=True)
    for task in (*tasks, *waiting):
        task.cancel()
    await asyncio.gather(*tasks, *waiting, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
