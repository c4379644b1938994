"""A swarm of light clients over real gRPC, and the check that it behaves as live devices do.

`Swarm` runs jobs in a few processes (benchmarks.swarm_worker); nothing there evaluates a model. Run as a program it
records held-out prompts, then sends each by a live device and by a light client in turn, one session at a time on
loopback, the verifier on one core and whoever drafts on another. `acceptance_over_live` is the median, over prompts
and rounds, of the replay's tokens per step over the live one's; it must be within 5% of 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenizers import Tokenizer

from benchmarks import harness, proc
from benchmarks.harness import Pair
from benchmarks.recording import generous, recorder
from benchmarks.replay import Job, Outcome, Where, options_of
from benchmarks.tape import Call, Tape
from cloud_verifier.config import VerifierConfig
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.request import Request
from edge_agent.sdk.types import Options
from outrider.core.errors import BadRequest, Unavailable
from outrider.core.tokenizer_json import token_table

TOKENS = 96
SETTINGS: Mapping[str, Options] = {
    "greedy": Options(max_tokens=TOKENS, temperature=0.0, seed=0),
    "T=0.8": Options(max_tokens=TOKENS, temperature=0.8, seed=20_260_731),
}
LEAST = 24
"""Tokens: an output that ends at once shows nothing."""
TOLERANCE = 0.05
_LINE_BYTES = 1 << 24


async def make_tape(
    where: Where, pair: Pair, prompts: Mapping[str, Sequence[int]], settings: Mapping[str, Options]
) -> Tape:
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
                    calls.append(Call(f"{name} {setting}", *asked, output, request.ignore_eos))
    return await asyncio.to_thread(record, pair, calls, description.eos_token_ids)


def record(pair: Pair, calls: Sequence[Call], ends: Sequence[int]) -> Tape:
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

    def __init__(self, file: Path, where: Where, *, processes: int = 1, cores: Sequence[int] = ()) -> None:
        self._command = [sys.executable, "-m", "benchmarks.swarm_worker", str(file), json.dumps(asdict(where))]
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

    async def play(self, job: Job) -> Outcome:
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
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
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

    async def play(self, job: Job) -> Outcome:
        if self._process.stdin is None or self._reading.done():
            raise Unavailable("a process of light clients has ended by itself; its errors stand above")
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
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
            _give(self._waiting.pop(data.pop("id")), Outcome(**data))
        for answer in self._waiting.values():
            _give(answer, Outcome(error="Died: its process has ended"))
        self._waiting.clear()


def _give(answer: asyncio.Future[Outcome], outcome: Outcome) -> None:
    """Unless nobody waits for it any more."""
    if not answer.done():
        answer.set_result(outcome)


async def against_live(
    tape: Tape, swarm: Swarm, client: AsyncClient, rounds: int
) -> dict[str, list[tuple[float, Outcome]]]:
    """By setting: tokens per step of a live session, and the replay's outcome, for each prompt and round."""
    found: dict[str, list[tuple[float, Outcome]]] = {}
    for turn in range(rounds):
        for number, recording in enumerate(tape.recordings):
            setting = recording.call.name.rpartition(" ")[2]
            live_first = (turn + number) % 2 == 0
            live = await _live(client, recording.call) if live_first else 0.0
            replayed = await swarm.play(Job(number))
            live = live or await _live(client, recording.call)
            if replayed.error:
                raise RuntimeError(f"the replay of {recording.call.name} failed: {replayed.error}")
            found.setdefault(setting, []).append((live, replayed))
    return found


async def _live(client: AsyncClient, call: Call) -> float:
    completion = await client.generate(call.prompt, **options_of(call))
    if completion.token_ids != call.output:
        raise RuntimeError(f"the live output of {call.name} is not the recorded one: run benchmarks.lossless")
    return completion.statistics.tokens_per_step


def report(found: Mapping[str, Sequence[tuple[float, Outcome]]]) -> dict[str, dict[str, float]]:
    """Print a line per setting; medians of live, replayed and their ratio, by setting."""
    result = {}
    for setting, pairs in found.items():
        ratios = [replayed.tokens / replayed.steps / live for live, replayed in pairs]
        live = statistics.median(live for live, _ in pairs)
        replay = statistics.median(replayed.tokens / replayed.steps for _, replayed in pairs)
        wrong = sum(replayed.wrong for _, replayed in pairs)
        asked, missed = (sum(getattr(replayed, name) for _, replayed in pairs) for name in ("asked", "missed"))
        print(
            f"{setting:<8} tokens per step: live {live:.2f}, replayed {replay:.2f}, ratio {harness.spread(ratios)};"
            f" {len(pairs)} pairs, {wrong} wrong tokens, {missed} of {asked} questions beyond the recording",
            flush=True,
        )
        result[setting] = {
            "live": round(live, 3),
            "replayed": round(replay, 3),
            "ratio": round(statistics.median(ratios), 4),
            "wrong": wrong,
        }
    return result


async def main() -> None:
    options = harness.arguments("swarm", __doc__).parse_args()
    pair = Pair.in_folder(options.models)
    rounds, count = (2, 4) if options.quick else (5, 18)
    verifier_core, device_core = harness.cores()
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = {p.id: tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")[:count]}
    async with harness.cluster(prefix_cache=False) as cluster:
        await cluster.start_coordinator("--listen", "127.0.0.1:0", cores=[device_core])
        arguments = ["--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1"]
        verifier = await cluster.start_verifier(*arguments, cores=[verifier_core])
        harness.pin(device_core)
        where = Where(verifier.address, cluster.address)
        tape = await make_tape(where, pair, prompts, SETTINGS)
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            file = Path(scratch, "tape.json")
            tape.save(file)
            print(f"{len(tape.recordings)} recordings; {_pace(tape)}", flush=True)
            async with (
                AsyncClient(coordinator=cluster.address) as client,
                Swarm(file, where, cores=[device_core]) as swarm,
            ):
                for recording in tape.recordings:  # the live draft learns as the recorded one has
                    await _live(client, recording.call)
                found = report(await against_live(tape, swarm, client, rounds))
    _finish(found)


def _pace(tape: Tape) -> str:
    decodes = ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in tape.decodes)
    return f"ms per recorded decode by width: {decodes}; commit {1000 * tape.commit_s:.2f}"


def _finish(found: Mapping[str, Mapping[str, float]]) -> None:
    harness.finish(
        {
            "acceptance_over_live": {setting: values["ratio"] for setting, values in found.items()},
            "tokens_per_step_live": {setting: values["live"] for setting, values in found.items()},
            "tokens_per_step_replayed": {setting: values["replayed"] for setting, values in found.items()},
            "wrong_tokens": sum(int(values["wrong"]) for values in found.values()),
        }
    )
    if any(values["wrong"] or abs(values["ratio"] - 1.0) > TOLERANCE for values in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
