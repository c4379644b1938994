"""Run light clients in processes of their own, and record what they replay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.support import harness, proc
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.recorder import generous, recorder
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest
from benchmarks.support.harness import Pair
from cloud_verifier.config import VerifierConfig
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.request import Request
from edge_agent.sdk.types import Options
from outrider.core.errors import BadRequest, Unavailable
from outrider.core.vocabulary import token_table

TOKENS = 96
SETTINGS: Mapping[str, Options] = {
    "greedy": Options(max_tokens=TOKENS, temperature=0.0, seed=0),
    "T=0.8": Options(max_tokens=TOKENS, temperature=0.8, seed=20_260_731),
}
LEAST = 24
"""Tokens: an output that ends at once shows nothing."""
_LINE_BYTES = 1 << 24


async def make_tape(
    where: ServiceAddress, pair: Pair, prompts: Mapping[str, Sequence[int]], settings: Mapping[str, Options]
) -> DraftRecording:
    """Record every prompt in every setting: the target's output by plain streaming, then the draft's answers.

    Outputs of fewer than LEAST tokens are left out. The draft runs in this process, on the cores that it is pinned to.
    """
    calls = []
    async with AsyncClient(
        coordinator=where.coordinator or None, verifier=None if where.coordinator else where.verifier, draft=None
    ) as client:
        description = (await client.prepare()).description
        for setting, options in settings.items():
            for name, prompt in prompts.items():
                request = Request.of(**options)
                output = (await client.generate(prompt, **options)).token_ids
                if len(output) >= LEAST:
                    asked = (tuple(prompt), request.sampling, request.max_tokens)
                    calls.append(RecordedRequest(f"{name} {setting}", *asked, output, request.ignore_eos))
    return await asyncio.to_thread(record, pair, calls, description.eos_token_ids)


def record(pair: Pair, calls: Sequence[RecordedRequest], ends: Sequence[int]) -> DraftRecording:
    """What the pair's draft says around these calls. Evaluates it in this process."""
    config = VerifierConfig(model=pair.target)
    table = token_table((pair.target / "tokenizer.json").read_bytes())
    with recorder(pair.draft, table, generous(config.directive, config.limits), ends) as recording:
        # Twice: what a draft that knows nothing yet asks, and what it asks once it has learned.
        untaught, taught = ([recording.record(call) for call in calls] for _ in range(2))
        both = [replace(b, answers={**a.answers, **b.answers}) for a, b in zip(untaught, taught, strict=True)]
        return recording.tape(both)


class Swarm:
    """Processes of light clients that play one tape. An async context manager.

    file: of the tape. cores: CPUs to pin the processes to, all where empty.
    """

    def __init__(self, file: Path, where: ServiceAddress, *, processes: int = 1, cores: Sequence[int] = ()) -> None:
        self._command = [
            sys.executable,
            "-m",
            "benchmarks.support.draft_replay.worker",
            str(file),
            json.dumps(asdict(where)),
        ]
        if cores:
            self._command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *self._command]
        self._nests: list[_Nest] = []
        self._processes = processes

    async def __aenter__(self) -> Self:
        for _ in range(self._processes):
            await self.add()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(nest.kill() for nest in self._nests))

    async def add(self) -> None:
        """One process more."""
        self._nests.append(await _Nest.start(self._command))

    async def play(self, job: SessionJob) -> SessionOutcome:
        """Run one session in the process that has the fewest. Of one that dies the outcome's error says so."""
        if not self._nests:
            raise BadRequest("the swarm has no process; use it as a context manager")
        return await min(self._nests, key=lambda nest: nest.busy).play(job)

    async def kill(self, number: int = 0) -> None:
        """kill -9 for one process, and with it for all its clients."""
        await self._nests.pop(number % len(self._nests)).kill()

    def cpu_s(self) -> float:
        """Seconds of CPU time that the living processes have used."""
        return sum(proc.cpu_seconds(nest.pid) for nest in self._nests)


class _Nest:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[SessionOutcome]] = {}
        self._numbers = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Nest:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=harness.ROOT,
            limit=_LINE_BYTES,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if process.stdout is None or not await process.stdout.readline():
            raise Unavailable("a process of light clients has ended at its start; its errors stand above")
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> int:
        """Sessions that run here."""
        return len(self._waiting)

    async def play(self, job: SessionJob) -> SessionOutcome:
        if self._process.stdin is None or self._reading.done():
            raise Unavailable("a process of light clients has ended by itself; its errors stand above")
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[SessionOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._process.stdin.write(json.dumps({"id": number} | asdict(job)).encode() + b"\n")
        return await answer

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        while self._process.stdout is not None and (line := await self._process.stdout.readline()):
            data = json.loads(line)
            _give(self._waiting.pop(data.pop("id")), SessionOutcome(**data))
        for answer in self._waiting.values():
            _give(answer, SessionOutcome(error="Died: its process has ended"))
        self._waiting.clear()


def _give(answer: asyncio.Future[SessionOutcome], outcome: SessionOutcome) -> None:
    """Unless nobody waits for it any more."""
    if not answer.done():
        answer.set_result(outcome)
