"""Run an engine process without a target: every 40 ms it commits tokens for each live session.

It speaks the product's protocol with the front over the product's socket pair. As a real engine it leaves out a session
whose device has not confirmed the last `run_ahead` tokens (rule 16 of the session protocol).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.front_load.shared_times import MAX_STEPS, SharedTimes
from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.ipc import EngineEnd
from cloud_verifier.engine_process.loop import STATS_INTERVAL_S, tell_alive
from cloud_verifier.engine_process.ranks import IGNORED_SIGNALS
from outrider.processes import leave
from outrider.wire.v1 import engine_pb2, session_pb2, telemetry_pb2

CORES, TIMES = "FRONT_LOAD_ENGINE_CORES", "FRONT_LOAD_TIMES"
"""Environment variables: cores of this process, separated by commas, and the file of SharedTimes."""
STEP_S = 0.040
TOKENS = (11, 222, 3333)
"""Token ids of each Commit."""
VOCABULARY = 32_000
HISTORY = bytes([2, 2, 0, 1]) * 32


@dataclass
class _Session:
    event: engine_pb2.EngineEvent
    """What its next Commit is sent in."""
    run_ahead: int
    base: int = 0
    """Tokens that its device has confirmed."""


class SteppingEngine:
    """Serves the front with Commits at a fixed pace, and notes when each step was sent and each Append came."""

    def __init__(self, end: EngineEnd, times: SharedTimes) -> None:
        self.expected_s = STEP_S
        """What `tell_alive` says of a step."""
        self._end = end
        self._times = times
        self._sessions: dict[str, _Session] = {}
        self._step = 0
        self._quit = False
        self._due = self._stats_due = time.monotonic()

    def run(self) -> None:
        while not (self._quit or self._end.closed):
            for request in self._end.receive(self._wait_s):
                self._take(request)
            now = time.monotonic()
            if now >= self._due:
                self._due = max(self._due + STEP_S, now)
                self._commit()
            if now >= self._stats_due:
                self._stats_due = now + STATS_INTERVAL_S
                self._end.send([engine_pb2.EngineEvent(stats=self._stats())])

    def _wait_s(self) -> float:
        return max(0.0, min(self._due, self._stats_due) - time.monotonic())

    def _take(self, request: engine_pb2.EngineRequest) -> None:
        session = self._sessions.get(request.session_id)
        match request.WhichOneof("kind"):
            case "append" if session is not None:
                append = request.append
                self._times.count_append(append.first_id)
                session.base = max(session.base, append.base)
                session.event.commit.seen = append.first_id + len(append.token) - 1
            case "start":
                commit = session_pb2.Commit(epoch=request.epoch, token=TOKENS)
                event = engine_pb2.EngineEvent(session_id=request.session_id, epoch=request.epoch, commit=commit)
                self._sessions[request.session_id] = _Session(event, request.start.limits.run_ahead)
            case "stop":
                self._sessions.pop(request.session_id, None)
            case "quit":
                self._quit = True

    def _commit(self) -> None:
        """Send a Commit for each session, with the step's number in the place of its evaluated nodes."""
        events = []
        self._step += 1
        for session in self._sessions.values():
            commit = session.event.commit
            if commit.start - session.base < session.run_ahead:
                commit.evaluated = self._step % MAX_STEPS
                copy = engine_pb2.EngineEvent()
                copy.CopyFrom(session.event)
                events.append(copy)
                commit.start += len(TOKENS)
        self._times.note_step(self._step)
        self._end.send(events)

    def _stats(self) -> engine_pb2.EngineStats:
        """Return statistics of the size that a real engine sends."""
        return engine_pb2.EngineStats(
            verifier=telemetry_pb2.VerifierTelemetry(
                live_sessions=len(self._sessions), step_ms=1000 * STEP_S, kv_capacity=1 << 20, min_acceptance=0.1
            ),
            sessions=[
                telemetry_pb2.SessionTelemetry(
                    session_id=session_id,
                    epoch=session.event.epoch,
                    steps=self._step,
                    committed=session.event.commit.start,
                    acceptance_history=HISTORY,
                    draft_ms=2.0,
                    nodes_per_level=1.5,
                )
                for session_id, session in self._sessions.items()
            ],
        )


def main() -> None:
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    os.sched_setaffinity(0, map(int, os.environ[CORES].split(",")))
    config = VerifierConfig.model_validate_json(sys.argv[2])
    with contextlib.ExitStack() as stack:
        end = EngineEnd(*(stack.enter_context(socket.socket(fileno=int(one))) for one in sys.argv[1].split(",")))
        target = session_pb2.TargetIdentity(name=config.target_name, weights_hash="sha256:none", dtype="none")
        ready = engine_pb2.EngineReady(target=target, vocabulary_size=VOCABULARY, max_sequence=1 << 17)
        try:
            engine = SteppingEngine(end, SharedTimes(Path(os.environ[TIMES])))
            end.send([engine_pb2.EngineEvent(ready=ready)])
            threading.Thread(target=tell_alive, args=(end, engine), name="alive", daemon=True).start()
            engine.run()
        except ConnectionError:
            pass  # the front has gone
    leave(0)


if __name__ == "__main__":
    main()
