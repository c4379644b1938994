"""Decide about the windows of many sessions in a process of its own.

In a thread it takes two to four times as long beside reports, and they wait for it: Python has one lock for both. The
process is started when it is first needed, and ends with its parent. On its standard streams a message is JSON behind
its length, 8 bytes little-endian.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, BinaryIO

from coordinator.api import codec
from coordinator.api.counters import WindowCounters
from coordinator.records import Decisions, Prior, Report
from coordinator.store.redis_codec import decisions_from_json, report_from_json, report_to_json
from coordinator.window import report_adapter
from outrider.core.errors import Unavailable
from outrider.core.histogram import Histogram
from outrider.core.protocol.messages import SessionLimits
from outrider.processes import end_with_parent, tied_to_this_process
from outrider.wire.v1 import coordinator_pb2 as pb

DECIDE_S = 10.0
"""Seconds in which the process must decide, its start included; it takes a few at most for the largest verifier."""
_LENGTH = struct.Struct("<Q")
Decided = tuple[Decisions, WindowCounters, float]
"""Decisions, the counts of their windows, and the seconds of CPU that they took."""


class DecidingProcess:
    """Decides about one verifier after the other; a call waits for those before it. Close it when done."""

    def __init__(self, limits: SessionLimits) -> None:
        """Start nothing yet. limits: of every session."""
        self._limits = limits
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._ended = False

    async def decide(self, report: Report, before: str, priors: Mapping[str, Prior]) -> Decided:
        """Return what the function `decide` returns. Raises Unavailable, and ChildProcessError if no process can be
        started."""
        different = list(dict.fromkeys(priors.values()))
        number = {prior: i for i, prior in enumerate(different)}
        request = {
            "report": report_to_json(report),
            "before": before,
            "priors": [(one.acceptance_history.hex(), one.draft_ms, one.nodes_per_level) for one in different],
            "prior_of": {session_id: number[prior] for session_id, prior in priors.items()},
        }
        child = await self._started()
        try:
            answer = await asyncio.wait_for(child.ask(json.dumps(request).encode()), DECIDE_S)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            await self._give_up(child)
            raise Unavailable(f"the process that decides has failed: {type(error).__name__}: {error}") from error
        if "error" in answer:
            raise Unavailable(f"the process that decides has failed: {answer['error']}")
        windows = WindowCounters()
        for name, (counts, total) in answer["windows"].items():
            bounds = getattr(windows, name).bounds
            setattr(windows, name, Histogram.of(bounds, counts, total))
        decisions = Decisions(answer["written"], base64.b64decode(answer["directives"]), report.store_unix)
        return decisions, windows, float(answer["cpu_s"])

    async def close(self) -> None:
        """End the process for good; calls that are under way fail."""
        self._ended = True
        async with self._starting:
            if self._child is not None:
                await self._give_up(self._child)

    async def _started(self) -> _Child:
        async with self._starting:
            if self._ended:
                raise Unavailable("this coordinator ends, and decides about nothing more")
            if self._child is None:
                self._child = await _Child.start(self._limits)
            return self._child

    async def _give_up(self, child: _Child) -> None:
        """End the process; the next decision starts another."""
        if self._child is child:
            self._child = None
        await child.end()


class _Child:
    """A process that answers requests in the order in which they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._asked: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._failed: BaseException | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, limits: SessionLimits) -> _Child:
        program = (sys.executable, "-m", __name__, json.dumps(vars(limits)), str(os.getpid()))
        pipe = asyncio.subprocess.PIPE
        try:
            return cls(await asyncio.create_subprocess_exec(*tied_to_this_process(), *program, stdin=pipe, stdout=pipe))
        except OSError as error:
            raise ChildProcessError(f"{sys.executable} cannot be started: {error}") from error

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Return the answer. Raises OSError, EOFError or ValueError when the process has failed."""
        if self._failed is not None:
            raise EOFError("it has ended") from self._failed
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answered)
        to_child = self._process.stdin
        if to_child is not None:
            to_child.write(_LENGTH.pack(len(request)) + request)
        return await answered

    async def end(self) -> None:
        """Kill the process; what was asked of it fails."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        from_child = self._process.stdout
        try:
            while from_child is not None:
                (length,) = _LENGTH.unpack(await from_child.readexactly(_LENGTH.size))
                answer = json.loads(await from_child.readexactly(length))
                answered = self._asked.popleft()
                if not answered.done():  # or it was given up meanwhile
                    answered.set_result(answer)
        except (OSError, EOFError, ValueError, IndexError) as error:
            self._failed = error
        for answered in self._asked:
            if not answered.done():
                answered.set_exception(EOFError("it has ended"))


def decide(report: Report, before: str, priors: Mapping[str, Prior], limits: SessionLimits) -> Decided:
    """Decide about the windows of a verifier's sessions.

    before: the last decisions, as the store keeps them. priors: by session id. limits: of every session. Raises
    OutriderError, or DecodeError of protobuf, for a report that is damaged.
    """
    begun = time.thread_time()
    verifier, sessions = codec.telemetry_from_proto(pb.ReportRequest.FromString(report.message))
    last = {one.session_id: one for one in decisions_from_json("", before)}
    found = report_adapter.decide(verifier, sessions, last, report.bounds, limits, priors).values()
    made = codec.encoded(found, limits, report.store_unix)
    return made, WindowCounters.of(found), time.thread_time() - begun


def answer_to(request: Mapping[str, Any], limits: SessionLimits) -> dict[str, Any]:
    """Return the process' answer to a request."""
    try:
        known = [Prior(bytes.fromhex(history), *measured) for history, *measured in request["priors"]]
        priors = {session_id: known[number] for session_id, number in request["prior_of"].items()}
        made, windows, cpu_s = decide(report_from_json(request["report"]), request["before"], priors, limits)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "written": made.written,
        "directives": base64.b64encode(made.directives).decode(),
        "windows": {name: [found.counts, found.sum] for name, found in vars(windows).items()},
        "cpu_s": cpu_s,
    }


def serve(requests: BinaryIO, answers: BinaryIO, limits: SessionLimits) -> None:
    """Answer requests until there are no more."""
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        request = requests.read(_LENGTH.unpack(head)[0])
        answer = json.dumps(answer_to(json.loads(request), limits)).encode()
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all; the parent decides when this process ends
    end_with_parent(int(sys.argv[2]))
    serve(sys.stdin.buffer, sys.stdout.buffer, SessionLimits(**json.loads(sys.argv[1])))
