"""Decide about the windows of sessions: of many in a process of its own, of few in a thread of this one.

In a thread it takes two to four times as long beside reports, and they wait for it: Python has one lock for both. The
process is started when it is first needed, and ends with its parent. On its standard streams a message is JSON behind
its length, 8 bytes little-endian.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
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

log = logging.getLogger(__name__)

DECIDE_S = 10.0
"""Seconds in which the process must decide about one verifier, its start included; the largest one takes it a few."""
IN_PROCESS_FROM = 32
"""Sessions of a verifier from which the process decides. About fewer this one decides as fast as it hands over."""
_LENGTH = struct.Struct("<Q")
Decided = tuple[Decisions, WindowCounters, float]
"""Decisions, the counts of their windows, and the seconds of CPU that they took."""


class Decider:
    """Decides about one verifier after the other; a call waits for those before it. Close it when done."""

    def __init__(self, limits: SessionLimits) -> None:
        """Start nothing yet. limits: of every session."""
        self._limits = limits
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._ended = False
        self._here = asyncio.Lock()
        self._rests_until = -math.inf
        """By the monotonic clock; no decision begins in this process before."""

    async def decide(self, report: Report, before: str, priors: Mapping[str, Prior]) -> Decided:
        """Return what the function `decide` returns. Raises Unavailable if the process that decides fails."""
        if report.sessions >= IN_PROCESS_FROM:
            try:
                return await self._decide_elsewhere(report, before, priors)
            except ChildProcessError as error:
                log.warning("no process can be started to decide, so this one does: %s", error)
        async with self._here:
            await asyncio.sleep(self._rests_until - time.monotonic())
            began = time.monotonic()
            try:
                return await asyncio.to_thread(decide, report, before, priors, self._limits)
            finally:  # it keeps the event loop waiting, to which this leaves half of the time
                self._rests_until = 2.0 * time.monotonic() - began

    async def _decide_elsewhere(self, report: Report, before: str, priors: Mapping[str, Prior]) -> Decided:
        """Have the process decide. Raises Unavailable, and ChildProcessError if none can be started."""
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
            asked = child.ask(json.dumps(request).encode())
            answer = await asyncio.wait_for(asked, DECIDE_S * child.asked)  # each of those before may take as long
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

    @property
    def asked(self) -> int:
        """Return the number of requests that have no answer yet."""
        return len(self._asked)

    def ask(self, request: bytes) -> asyncio.Future[dict[str, Any]]:
        """Send a request, whose answer raises EOFError if the process fails, as this does where it has failed."""
        if self._failed is not None:
            raise EOFError("it has ended") from self._failed
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answered)
        to_child = self._process.stdin
        if to_child is not None:
            to_child.write(_LENGTH.pack(len(request)) + request)
        return answered

    async def end(self) -> None:
        """Kill the process; what was asked of it fails."""
        self._kill()
        await self._process.wait()
        await asyncio.wait({self._reading})

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

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
        self._kill()
        for answered in self._asked:
            if not answered.done():
                answered.set_exception(EOFError("it has ended"))
        if from_child is not None:
            await from_child.read()  # a pipe that is not read to its end keeps the process from being waited for


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
