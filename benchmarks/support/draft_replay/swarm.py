"""Run light clients in processes of their own, and record what they replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome, options_of
from benchmarks.support.draft_replay.recorder import generous, recorder
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedProposals, RecordedRequest
from benchmarks.support.old_harness import Pair
from benchmarks.support.proc import JsonWorker
from cloud_verifier.config import VerifierConfig
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.request import Request
from edge_agent.sdk.types import Options
from outrider.core.errors import BadRequest, Unavailable
from outrider.core.vocabulary import token_table

LEAST = 24
"""Least tokens of an output that is recorded; an output that ends at once shows nothing."""
_WORKER = "benchmarks.support.draft_replay.worker"


def settings(tokens: int = 96) -> dict[str, Options]:
    """Return the sampling settings in which benchmarks record prompts, by name."""
    return {
        "greedy": Options(max_tokens=tokens, temperature=0.0, seed=0),
        "T=0.8": Options(max_tokens=tokens, temperature=0.8, seed=20_260_731),
    }


async def record_drafts(
    where: ServiceAddress, pair: Pair, prompts: Mapping[str, Sequence[int]], settings: Mapping[str, Options]
) -> DraftRecording:
    """Record every prompt in every setting: the target's output by plain streaming, then the draft's answers.

    Outputs of fewer than LEAST tokens are left out. The draft runs in this process, on the cores that it is pinned to.
    """
    calls = []
    async with AsyncClient(
        coordinator=where.coordinator or None,
        verifier=None if where.coordinator else where.verifier,
        draft=None,
        timeout=None,
    ) as client:
        description = (await client.prepare()).description
        for setting, options in settings.items():
            for name, prompt in prompts.items():
                request = Request.of(**options)
                output = (await client.generate(prompt, **options)).token_ids
                if len(output) >= LEAST:
                    asked = (tuple(prompt), request.sampling, request.max_tokens or len(output))
                    calls.append(RecordedRequest(f"{name} {setting}", *asked, output, request.ignore_eos))
    return await asyncio.to_thread(record, pair, calls, description.eos_token_ids)


async def repeated(where: ServiceAddress, recordings: Sequence[RecordedProposals]) -> list[int]:
    """Return the indices of the recordings whose output this verifier repeats, by plain streaming.

    Another engine than the one that was recorded may decide a tie otherwise.
    """
    async with AsyncClient(
        coordinator=where.coordinator or None,
        verifier=None if where.coordinator else where.verifier,
        draft=None,
        timeout=None,
    ) as client:
        outputs = await asyncio.gather(
            *(client.generate(one.call.prompt, **options_of(one.call)) for one in recordings)
        )
    pairs = zip(recordings, outputs, strict=True)
    return [i for i, (one, output) in enumerate(pairs) if output.token_ids == one.call.output]


def record(pair: Pair, calls: Sequence[RecordedRequest], ends: Sequence[int]) -> DraftRecording:
    """Record what the pair's draft proposes around these requests. The draft runs in this process."""
    config = VerifierConfig(model=pair.target)
    table = token_table((pair.target / "tokenizer.json").read_bytes())
    with recorder(pair.draft, table, generous(config.directive, config.limits), ends) as recording:
        # Twice: what a draft that knows nothing yet asks, and what it asks once it has learned.
        untaught, taught = ([recording.record(call) for call in calls] for _ in range(2))
        both = [replace(b, answers={**a.answers, **b.answers}) for a, b in zip(untaught, taught, strict=True)]
        return recording.finish(both)


class Swarm:
    """Run processes of light clients that replay one recording. Use it as an async context manager.

    file: of the DraftRecording. cores: CPUs to pin the processes to; all of them if empty. draft: the file of the
    recorded draft, for live jobs.
    """

    def __init__(
        self,
        file: Path,
        where: ServiceAddress,
        *,
        processes: int = 1,
        cores: Sequence[int] = (),
        draft: Path | None = None,
    ) -> None:
        self._arguments = (str(file), json.dumps(asdict(where)), *(("--draft", str(draft)) if draft else ()))
        self._cores = cores
        self._processes = processes
        self._workers: list[JsonWorker] = []

    async def __aenter__(self) -> Self:
        for _ in range(self._processes):
            await self.add()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def add(self) -> None:
        """Start one more process."""
        self._workers.append(await JsonWorker.start(_WORKER, *self._arguments, cores=self._cores))

    async def play(self, job: SessionJob) -> SessionOutcome:
        """Run one session in the process that has the fewest.

        If that process is killed meanwhile, the outcome's error begins with "Died". Raises Unavailable if it had ended
        by itself before.
        """
        if not self._workers:
            raise BadRequest("the swarm has no process; use it as a context manager")
        worker = min(self._workers, key=lambda worker: worker.pending)
        if worker.ended:
            raise Unavailable("a process of light clients has ended by itself; its errors stand above")
        try:
            return SessionOutcome(**await worker.ask(**asdict(job)))
        except Unavailable:
            return SessionOutcome(error="Died: its process has ended")

    async def kill(self, number: int = 0) -> None:
        """Send SIGKILL to one process, and so end all its clients."""
        await self._workers.pop(number % len(self._workers)).kill()
