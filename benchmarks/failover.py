"""Kill or stop the serving verifier in the middle of a session; the client must notice no more than a pause.

Two verifiers, one session at a time, greedy and sampled in turn. At a random point between 20% and 80% of the tokens
the serving verifier is killed with its whole process group (kill -9), or stopped (SIGSTOP) and woken again once the
standby has taken over. The output is compared with that of an undisturbed run of the same request. The time is what the
client sees: from the signal to the first token that the next verifier commits, so that tokens which were on their way
when the signal was sent do not count.

A woken verifier does not know that its session has moved. The benchmark keeps its stream open and hands every Commit
that still comes of it to the device, among those of the new stream. The device must refuse all of them.
"""

from __future__ import annotations

import asyncio
import difflib
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lossless import SETTINGS
from benchmarks.support import old_harness as harness
from benchmarks.support.old_harness import Criterion, Pair, Size
from benchmarks.support.stream_sniffer import FailoverTrace, SniffedClient, StaleCommits, StreamSniffer, count_stale
from coordinator.cluster import Child, Cluster
from edge_agent.sdk.client import AsyncClient
from outrider.wire.v1 import coordinator_pb2 as pb

TOKENS = 160
SEED = 20_260_801
KILL, STOP = "kill -9", "SIGSTOP"
SETTLE_S = 1_800.0
"""Time after which verifiers that have not come to rest never will. No figure depends on it."""


@dataclass(frozen=True)
class FailoverTrial:
    """Describe one request, and the signal that its verifier gets once `point` tokens were delivered."""

    kind: str
    setting: str
    prompt: list[int]
    point: int


@dataclass(frozen=True)
class TrialResult:
    lost: int
    duplicated: int
    differing: int
    resume_ms: float
    trace: FailoverTrace
    tokens: int = 0
    """Tokens of the disturbed output."""


def trials(prompts: Sequence[list[int]], runs: int) -> list[FailoverTrial]:
    """Return trials in which both signals and both settings alternate; the points come from a seeded generator."""
    draw = random.Random(SEED)
    low, high = TOKENS // 5, 4 * TOKENS // 5
    settings = list(SETTINGS)
    return [
        FailoverTrial((KILL, STOP)[i // 2 % 2], settings[i % 2], prompts[i % len(prompts)], draw.randint(low, high))
        for i in range(runs)
    ]


def smoke_trials(prompts: Sequence[list[int]]) -> list[FailoverTrial]:
    """Return one trial of each signal, the early one first: after a SIGSTOP no verifier has to be started again."""
    return [FailoverTrial(STOP, "sampled", prompts[0], TOKENS // 5), FailoverTrial(KILL, "greedy", prompts[1], 40)]


def compare(got: Sequence[int], expected: Sequence[int]) -> tuple[int, int, int]:
    """Return the numbers of tokens lost, duplicated and differing."""
    lost = duplicated = differing = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if kind == "delete":
            lost += b - a
        elif kind == "insert":
            duplicated += d - c
        elif kind == "replace":
            differing += max(b - a, d - c)
    return lost, duplicated, differing


class FailoverRun:
    """Run a cluster of two verifiers on one core, and a device on another."""

    def __init__(self, cluster: Cluster, pair: Pair, cache: Path) -> None:
        self._cluster = cluster
        self._flags = ("--model", str(pair.target), "--draft", str(pair.draft))
        self._core, device_core = harness.cores()
        harness.pin(device_core)
        self._sniffer = StreamSniffer()
        self._client_options = {"coordinator": cluster.address, "cache_dir": cache, "timeout": None}

    async def run(self, plan: Sequence[FailoverTrial]) -> list[TrialResult]:
        results = []
        async with SniffedClient(self._sniffer, **self._client_options) as client:
            await self._restore()
            for number, trial in enumerate(plan, start=1):
                undisturbed = await self._undisturbed(client, trial)
                result = await self._disturbed(client, trial, undisturbed)
                _print(number, trial, result)
                results.append(result)
                if number < len(plan):
                    await self._restore()
        return results

    async def _undisturbed(self, client: AsyncClient, trial: FailoverTrial) -> Sequence[int]:
        self._sniffer.begin()
        completion = await client.generate(trial.prompt, **_options(trial))
        await self._sniffer.end()
        return completion.token_ids

    async def _disturbed(self, client: AsyncClient, trial: FailoverTrial, undisturbed: Sequence[int]) -> TrialResult:
        """Run the trial. Raises RuntimeError if the session was not resumed on another verifier."""
        self._sniffer.begin()
        trace = self._sniffer.trace
        got: list[int] = []
        resumed = 0.0
        victim: Child | None = None
        stream = await client.stream(trial.prompt, **_options(trial))
        async with stream:
            async for chunk in stream:
                got += chunk.token_ids
                if victim is None and len(got) >= trial.point:
                    victim = self._serving()
                    trace.signalled = time.monotonic()
                    victim.signal_group(signal.SIGKILL if trial.kind == KILL else signal.SIGSTOP)
                elif victim is not None and trace.resumed and not resumed:
                    resumed = time.monotonic()
                    if trial.kind == STOP:
                        victim.signal_group(signal.SIGCONT)
        if victim is not None and trial.kind == STOP:
            victim.signal_group(signal.SIGCONT)
            await asyncio.sleep(0.2)  # Commits that come after the end must be refused too
        await self._sniffer.end()
        if not resumed or len(set(trace.addresses)) < 2:
            raise RuntimeError(f"no failover took place: {len(got)} tokens, attached at {trace.addresses}")
        return TrialResult(*compare(got, undisturbed), 1000.0 * (resumed - trace.signalled), trace, len(got))

    def _serving(self) -> Child:
        address = self._sniffer.trace.addresses[-1]
        return next(child for child in self._cluster.verifiers if child.running and child.address == address)

    async def _restore(self) -> None:
        """Wait for two verifiers that the coordinator knows and that hold nothing; start new ones for dead ones."""
        verifiers = self._cluster.verifiers
        verifiers[:] = [child for child in verifiers if child.running]
        await asyncio.gather(
            *(self._cluster.start_verifier(*self._flags, cores=(self._core,)) for _ in range(2 - len(verifiers)))
        )
        give_up = time.monotonic() + SETTLE_S
        wanted = {child.address for child in verifiers}
        while not _settled(await harness.status(self._cluster.address), wanted):
            if time.monotonic() > give_up:
                raise TimeoutError(f"the verifiers have not come to rest within {SETTLE_S:.0f} s")
            await asyncio.sleep(0.2)


def _settled(status: pb.StatusResponse, wanted: set[str]) -> bool:
    here = {verifier.address for verifier in status.verifiers}
    loads = [verifier.telemetry for verifier in status.verifiers]
    return here == wanted and not any(load.kv_used or load.live_sessions for load in loads)


def _options(trial: FailoverTrial) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, **asdict(SETTINGS[trial.setting])}


def _print(number: int, trial: FailoverTrial, result: TrialResult) -> None:
    trace = result.trace
    noticed, attached, resumed = (
        1000 * (end - begin)
        for begin, end in (
            (trace.signalled, trace.noticed),
            (trace.noticed, trace.attached),
            (trace.attached, trace.resumed),
        )
    )
    late = f", {trace.late_commits} late Commits" if trial.kind == STOP else ""
    print(
        f"{number:>2}  {trial.kind:<8} {trial.setting:<8} at token {trial.point:>3}: lost {result.lost},"
        f" duplicated {result.duplicated}, differing {result.differing}; resumed after {result.resume_ms:.0f} ms"
        f" (noticed {noticed:.0f}, attached +{attached:.0f}, token +{resumed:.0f}),"
        f" {len(trace.addresses)} attaches{late}",
        flush=True,
    )


async def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("failover", __doc__).parse_args(argv)
    pair = Pair.in_folder(options.models)
    prompts = list(pair.encode(harness.prompts("heldout")).values())
    smoke = options.size is Size.SMOKE
    plan = smoke_trials(prompts) if smoke else trials(prompts, options.size.pick(smoke=2, quick=4, full=20))
    _, device_core = harness.cores()
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch, count_stale() as stale:
        async with harness.cluster(prefix_cache=False) as cluster:
            state = ("--state-dir", str(Path(scratch, "state")))
            await cluster.start_coordinator(*harness.LOOPBACK, *state, cores=[device_core])
            results = await FailoverRun(cluster, pair, Path(scratch, "cache")).run(plan)
    finish(plan, results, stale, options.size)


def finish(
    plan: Sequence[FailoverTrial], results: Sequence[TrialResult], stale: StaleCommits, size: Size = Size.FULL
) -> None:
    """Print the pauses and the last line; exits with status 1 for a token that is not the undisturbed run's.

    A tie is no excuse, since both verifiers run on one machine.
    """
    by_kind = {
        kind: [r.resume_ms for t, r in zip(plan, results, strict=True) if t.kind == kind] for kind in (KILL, STOP)
    }
    for kind, times in by_kind.items():
        print(f"{kind:<8} resumed after {harness.spread(times)} ms")
    late = [r.trace.late_commits for t, r in zip(plan, results, strict=True) if t.kind == STOP]
    print(
        f"woken verifiers sent {sum(late)} Commits after the device had moved (per run: {late});"
        f" the device refused {stale.refused}, accepted {stale.accepted} and had ended before the others came"
    )
    times = [result.resume_ms for result in results]
    lost, duplicated, differing = (
        sum(getattr(result, name) for result in results) for name in ("lost", "duplicated", "differing")
    )
    harness.finish(
        {
            "runs": len(results),
            "tokens": sum(result.tokens for result in results),
            "lost": lost,
            "duplicated": duplicated,
            "differing": differing,
            "resume_ms_p50": round(statistics.median(times), 1),
            "resume_ms_max": round(max(times), 1),
            "kill9_resume_ms_p50": round(statistics.median(by_kind[KILL]), 1),
            "kill9_resume_ms_max": round(max(by_kind[KILL]), 1),
            "sigstop_resume_ms_p50": round(statistics.median(by_kind[STOP]), 1),
            "sigstop_resume_ms_max": round(max(by_kind[STOP]), 1),
            "zombie_commits": sum(late),
            "zombie_refused": stale.refused,
            "zombie_accepted": stale.accepted,
        },
        [
            Criterion.none("tokens lost", lost),
            Criterion.none("tokens duplicated", duplicated),
            Criterion.none("tokens that differ", differing),
            Criterion.none("Commits of a woken verifier that the device accepted", stale.accepted),
            Criterion.bound(
                "Commits of a woken verifier that the device refused",
                stale.refused,
                at_least=1,
                enforced_from=Size.SMOKE,
            ),
        ],
        size,
    )


if __name__ == "__main__":
    asyncio.run(main())
